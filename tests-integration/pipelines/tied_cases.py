"""What the workers of ``test_tied_pipelines.py`` run: a tied weight on the first and last stage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pipelines.batches import (
    Gradients,
    LocalAdamW,
    local_parameters,
    microbatches,
    new_loss,
    new_model,
    reduced_as,
    set_weights,
    taken_gradients,
    unequal,
)
from pipelines.cases import (
    NUM_BATCHES,
    PipelineCase,
    evaluate,
    step_losses,
    whole_batch,
)
from pipelines.resume_cases import KEPT, different_digests, digests
from training_cases import differing

from gt_trainer.decoder.tied_stages import EMBEDDING, PROJECTION
from gt_trainer.local_update import clip_gradients
from gt_trainer.metrics.metrics_history import read_metrics
from gt_trainer.trainer import GraphTrainer

TIED = (EMBEDDING, PROJECTION)


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedFound:
    """What a rank saw."""

    differences: tuple[str, ...]
    copies: tuple[str, ...]
    """Names of the tied weight here."""

    num_gradients: int


def compare_tied(
    case: PipelineCase, folder: str, eager: bool, num_batches: int = NUM_BATCHES
) -> TiedFound:
    """Optimizer steps of captured stages, and of the whole model with both uses apart.

    What the pipeline sums first, over microbatches and over data ranks, is summed first there too:
    the gradient of each use. With ``eager``, PyTorch's runtime trains as well; its bits are the
    same where nothing is reduced over ranks.
    """
    trainer = case.trainer("aot_fx_trace", f"{folder}/captured")
    problems = _copies_differ([trainer], "as drawn")
    trainers = [trainer, *([case.trainer("none", f"{folder}/eager")] if eager else [])]
    for each in trainers:
        for part in each.model_parts:
            _set_weights(part)
    apart, tied = _whole(trainer, is_tied=False), _whole(trainer, is_tied=True)
    loss_apart, loss_tied = new_loss(trainer, apart), new_loss(trainer, tied)
    optimizers = [LocalAdamW(each.model_parts) for each in trainers]
    of_apart, of_tied = LocalAdamW([apart]), LocalAdamW([tied])
    num_gradients = 0
    for batch in range(num_batches):
        what = f"batch {batch}"
        found_eval = evaluate(trainer, microbatches(trainer, batch))
        found = step_losses(trainer, batch)
        expected_eval, expected, uses = whole_batch(trainer, apart, loss_apart, batch)
        *_, in_one = whole_batch(trainer, tied, loss_tied, batch)
        here = dict(_named(trainer))
        norm = _clipped_norm(trainer)
        gradients = taken_gradients(trainer.model_parts)
        num_gradients += len(gradients)
        placed_as = dict(here)
        for name, other in (TIED, TIED[::-1]):
            placed_as.setdefault(name, here.get(other))
        own = {name: uses[name] for name in gradients}
        if any(name in here for name in TIED):
            reduced = reduced_as(placed_as, own | {name: uses[name] for name in TIED}, trainer)
            total = reduced[PROJECTION] + reduced[EMBEDDING]
            reduced |= dict.fromkeys(TIED, total)
            whole = reduced_as(placed_as, {EMBEDDING: in_one[EMBEDDING]}, trainer)[EMBEDDING]
            if not torch.allclose(total, whole, rtol=1e-4, atol=1e-6 * whole.abs().max()):
                problems.append(f"{what}: the sum is not the tied model's gradient")
        else:
            reduced = reduced_as(here, own, trainer)
        expected_here = {name: reduced[name] for name in gradients}
        problems += differing(gradients, expected_here, f"{what}, whole: gradient")
        if trainer.pp_has_last_stage:
            problems += unequal(f"{what}, whole", found, expected)
            problems += unequal(f"{what}, evaluation", found_eval, expected_eval)
        problems += _wrong_norm(what, norm, uses, trainer)
        if eager:
            runtime = trainers[1]
            eager_losses = step_losses(runtime, batch)
            eager_gradients = taken_gradients(runtime.model_parts)
            problems += differing(gradients, eager_gradients, f"{what}, runtime: gradient")
            if trainer.pp_has_last_stage:
                problems += unequal(f"{what}, runtime", found, eager_losses)
            optimizers[1].step(eager_gradients)
        optimizers[0].step(gradients)
        step_of_apart = reduced_as(dict(apart.named_parameters()), uses, trainer)
        step_of_apart |= dict.fromkeys(TIED, step_of_apart[PROJECTION] + step_of_apart[EMBEDDING])
        of_apart.step(step_of_apart)
        # The tied model follows the others: its own gradient rounds otherwise.
        of_tied.step({name: each for name, each in step_of_apart.items() if name != PROJECTION})
        problems += _copies_differ(trainers, f"after {what}")
    names = tuple(name for name in TIED if name in dict(_named(trainer)))
    for each in trainers:
        each.close()
    return TiedFound(differences=tuple(problems), copies=names, num_gradients=num_gradients)


def accumulated_gradients(case: PipelineCase, folder: str) -> list[str]:
    """Two runs of the schedule before one update: the tied weight's gradient, eager and captured.

    Of all others PyTorch's runtime adds up microbatch by microbatch.
    """
    found = []
    for mode in ("aot_fx_trace", "none"):
        trainer = case.trainer(mode, f"{folder}/{mode}")
        for part in trainer.model_parts:
            _set_weights(part)
        for batch in (0, 1):
            step_losses(trainer, batch)
        gradients = taken_gradients(trainer.model_parts)
        found.append({name: gradients[name] for name in TIED if name in gradients})
        trainer.close()
    return differing(*found, "gradient") if found[0] else ["no gradient"]


# ---- training and checkpoints -------------------------------------------------------------------


def trained_tied(case: PipelineCase, mode: str, folder: str) -> tuple[list[float], list[str]]:
    """Train for two steps: losses, on rank 0, and whether the copies differ then."""
    trainer = case.trainer(mode, folder)
    trainer.config.training.steps = 2
    trainer.train()
    problems = _copies_differ([trainer], "after two steps")
    trainer.close()
    dist.barrier()
    return [each["loss"] for each in read_metrics(Path(folder, "metrics.jsonl"))], problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """A run that was saved under some degrees and went on under others."""

    differences: tuple[str, ...]
    """Between what was saved and what was loaded, and between the losses of the step after it."""

    saved_names: frozenset[str]
    """Tensors and values of the checkpoint."""


def resumed_tied(
    case: PipelineCase, before: dict[str, int], after: dict[str, int], folder: str
) -> Resumed:
    """Train two steps under ``before``, then the third under both; what differs."""
    saved = _trainer_on(case, before, folder, steps=2)
    saved.train()
    state = _state(saved)
    saved.close()
    names = frozenset(_names_of(Path(folder, "checkpoint", "step-2")))
    differences: list[str] = []
    third = []
    for degrees in (before, after):
        resumed = _trainer_on(case, degrees, folder, steps=3, load_only=True)
        resumed.checkpointer.load(step=2)
        unlike = different_digests(state, _state(resumed))
        differences += [f"{each}, under {degrees}" for each in unlike]
        resumed.train()
        differences += _copies_differ([resumed], f"step 3 under {degrees}")
        resumed.close()
        dist.barrier()
        third.append(read_metrics(Path(folder, "metrics.jsonl"))[-1])
    first, second = third
    differences += [
        f"{key} of step 3: {first[key]} and {second[key]}"
        for key, tolerance in (("loss", 1e-6), ("grad_norm", 1e-4))
        if abs(first[key] - second[key]) > tolerance * abs(first[key])
    ]
    if first["step"] != 3 or not state:
        differences.append(f"ended at step {first['step']} with {len(state)} saved")
    return Resumed(differences=tuple(differences), saved_names=names)


def published_weights(case: PipelineCase, folder: str) -> tuple[str, ...]:
    """Train, write Hugging Face's form, and read it into stages and into the whole model."""
    stages, whole = {"pipeline_parallel_degree": 2}, {"pipeline_parallel_degree": 1}
    exported = {"last_save_model_only": True, "last_save_in_hf": True}
    trainer = _trainer_on(case, stages, folder, steps=1, **exported)
    trainer.train()
    state = _state(trainer, with_optimizer=False)
    trainer.close()
    differences = []
    imported = {"initial_load_in_hf": True, "initial_load_path": f"{folder}/checkpoint/step-1"}
    for number, degrees in enumerate((stages, {**whole, "tensor_parallel_degree": 2})):
        resumed = _trainer_on(case, degrees, f"{folder}/{number}", steps=2, **imported)
        resumed.checkpointer.load()
        unlike = different_digests(state, _state(resumed, with_optimizer=False))
        resumed.close()
        differences += [f"{each}, under {degrees}" for each in unlike]
    return tuple(differences)


def _trainer_on(
    case: PipelineCase, degrees: dict[str, int], folder: str, *, steps: int, **checkpoint: Any
) -> GraphTrainer:
    trainer = case.trainer("aot_fx_trace", folder, degrees=degrees, **{**KEPT, **checkpoint})
    trainer.config.training.steps = steps
    return trainer


def _state(trainer: GraphTrainer, *, with_optimizer: bool = True) -> dict[str, str]:
    """Digests, of the tied weight under one name on all ranks."""
    return digests(
        trainer,
        with_optimizer=with_optimizer,
        called=lambda name: EMBEDDING if name == PROJECTION else name,
    )


def _names_of(checkpoint: Path) -> list[str]:
    from torch.distributed.checkpoint import FileSystemReader

    return list(FileSystemReader(checkpoint).read_metadata().state_dict_metadata)


# ---- models, gradients --------------------------------------------------------------------------


def _whole(trainer: GraphTrainer, *, is_tied: bool) -> Any:
    config = trainer.model_config
    try:
        config.enable_weight_tying = is_tied
        model = new_model(trainer, lambda model: model)
    finally:
        config.enable_weight_tying = True
    if not is_tied:
        _set_weights(model)
    return model


def _set_weights(model: Any) -> None:
    """As ``set_weights``, the projection with the values of the embedding."""
    set_weights(model)
    if model.lm_head is None or model.lm_head.weight is getattr(
        model.tok_embeddings, "weight", None
    ):
        return
    holder = torch.nn.Module()
    holder.tok_embeddings = model.lm_head
    set_weights(holder)


def _named(trainer: GraphTrainer) -> list[tuple[str, torch.nn.Parameter]]:
    return [each for part in trainer.model_parts for each in part.named_parameters()]


def _copies_differ(trainers: list[GraphTrainer], when: str) -> list[str]:
    """Whether this rank's part of the weight is the other copy's, bit for bit."""
    problems = []
    for trainer in trainers:
        mine = {n: p for n, p in local_parameters(trainer.model_parts).items() if n in TIED}
        everywhere: list[Any] = [None] * trainer.parallel_dims.pp
        group = trainer.parallel_dims.get_optional_mesh("pp")
        if group is None:
            return []
        dist.all_gather_object(everywhere, mine, group=group.get_group())
        copies = [copy for each in everywhere for copy in each.values()]
        if len(copies) != 2 or not torch.equal(*copies) or copies[0].isnan().any():
            problems.append(f"{when}: the copies differ")
    return problems


def _clipped_norm(trainer: GraphTrainer) -> float:
    """As the trainer finds it; gradients stay, for the limit is far."""
    return clip_gradients(
        [parameter for _, parameter in _named(trainer)],
        1e30,
        second_copies=trainer._second_copies,
        pp_mesh=trainer.parallel_dims.get_mesh("pp"),
        ep_enabled=False,
    ).item()


def _wrong_norm(what: str, norm: float, uses: Gradients, trainer: GraphTrainer) -> list[str]:
    once = {name: each for name, each in uses.items() if name != PROJECTION}
    once[EMBEDDING] = uses[PROJECTION] + uses[EMBEDDING]
    # Like nothing that is placed: of whole gradients.
    whole = reduced_as(dict.fromkeys(once, torch.nn.Parameter(torch.empty(0))), once, trainer)
    expected = torch.stack([each.double().norm() for each in whole.values()]).norm().item()
    # A CPU adds half a million squares in float32; a weight counted twice is percents away.
    return [] if abs(norm - expected) <= 1e-4 * expected else [f"{what}: norm {norm}, {expected}"]
