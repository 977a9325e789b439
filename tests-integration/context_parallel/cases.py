"""What workers run of models whose ranks share sequences. Workers import this module by name."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from capture.cases import VariantResult, compare_variants
from flex_attention.cases import own_flex_attention
from float64_runs import float64_for_float32
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn.attention.flex_attention import create_block_mask
from torchtitan.distributed.context_parallel import (
    apply_cp_to_forward,
    prepare_context_parallel_input,
)
from torchtitan.models.common.attention import get_causal_mask_mod
from training_cases import (
    Case,
    Comparison,
    RecordingTrainer,
    close,
    compare_modes,
    differing,
    differing_passes,
    local,
    trainer_of,
)

from gt_trainer.context_parallel.batch_of_rank import batch_of_rank
from gt_trainer.placement import parallelize
from gt_trainer.trainer import GraphTrainer

LENGTH = 64
DOCUMENT = slice(16, 40)
"""Tokens of the second of three documents."""

PROBE = 30
"""A token of it, the last whose loss counts."""


# ---- the tokens of a rank ------------------------------------------------------------------------


def tokens_as_torchtitans(balancer: str | None) -> list[bool]:
    """Whether each part of a batch of rank is what torchtitan makes of the same batch."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    length = 128 * dist.get_world_size()
    positions = torch.arange(length).repeat(2, 1)
    tokens = torch.randint(2048, (2, length), generator=torch.Generator().manual_seed(1))
    with _eager_block_masks():
        mask = create_block_mask(get_causal_mask_mod(), 2, None, length, length, device="cpu")
        theirs = prepare_context_parallel_input(
            tokens,
            tokens + 1,
            {"positions": positions, "attention_masks": mask},
            mesh,
            torch.device("cpu"),
            balancer,
        )
    batch = {"input": tokens, "positions": positions}
    ours: Any = batch_of_rank(batch, tokens + 1, mesh, load_balancer=balancer)  # type: ignore[arg-type]  # a str here
    # torchtitan's mask is a function of the places of tokens.
    places = torch.arange(length)
    block_mask = theirs[2]["attention_masks"]
    dense = torch.stack(
        [
            block_mask.mask_mod(torch.tensor(sample), torch.tensor(0), places[:128, None], places)
            for sample in range(2)
        ]
    )
    return [
        torch.equal(ours[0], theirs[0]),
        torch.equal(ours[1], theirs[1]),
        torch.equal(ours[2]["positions"], theirs[2]["positions"]),
        torch.equal(ours[2]["attention_masks"][:, 0], dense),
    ]


@contextmanager
def _eager_block_masks() -> Iterator[None]:
    """Inside, PyTorch does not compile what makes a rank's mask."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_attention, "_compiled_create_block_mask", create_block_mask)
        yield


# ---- bits ----------------------------------------------------------------------------------------


def compare_with_flex_attention(case: Case, folder: str) -> Comparison:
    """Captured steps against eager ones in which torchtitan gathers keys and values itself."""
    gathers: list[str] = []

    def place(model: Any, mesh: Any, **options: Any) -> int:
        attention = [block.attention.inner_attention for block in model.layers.values()]
        if gathers.pop(0) == "torchtitan":
            apply_cp_to_forward(attention, mesh)
            return len(attention)
        return ours(model, mesh, **options)

    ours = parallelize.attend_to_all_ranks
    with own_flex_attention(), _eager_block_masks(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallelize, "attend_to_all_ranks", place)
        gathers += ["torchtitan", "ours"]  # of the eager trainer, then of the captured one
        found = compare_modes(case, folder, options={"capture_layers": "full"})
        assert gathers == []
        return found


def compare_rings(case: Case, folder: str, attention: str) -> tuple[Comparison, Distance]:
    """Rings of captured steps against rings of eager ones; and one step against whole sequences."""
    ring = {"context_parallel": "ring"}
    with ExitStack() as entered:
        if attention == "flex":
            entered.enter_context(own_flex_attention())
            entered.enter_context(_eager_block_masks())
        found = compare_modes(case, f"{folder}/bits", options={"capture_layers": "full"}, both=ring)
        return found, distance_to_whole_sequences(case, f"{folder}/distance", ring)


# ---- a whole sequence on every rank --------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """How far two runs are apart, each number relative."""

    loss: float
    gradients: Mapping[str, float]
    """By parameter: the norm of the difference over the norm."""


def distance_to_whole_sequences(
    case: Case,
    folder: str,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Distance:
    """The captured step of ``case`` against an eager one with data parallelism alone, on one batch.

    Every data-parallel rank has the same batch, so that their gradients add up to as many times
    those of one, and the loss is divided by as many tokens.
    """
    unshared = dataclasses.replace(case, parallelism={})
    expected = _loss_and_gradients(unshared, "none", f"{folder}/none", {})
    found = _loss_and_gradients(case, "aot_fx_trace", f"{folder}/shared", options)
    return _distance(expected, found)


def distances_of_rings_to_gathered_keys(case: Case, folder: str) -> tuple[Distance, Distance]:
    """How far one captured step in a ring is from one that gathers: in float32, and in float64."""
    distances = []
    for precision in (nullcontext(), float64_for_float32()):
        with precision:
            gathered, ring = (
                _loss_and_gradients(
                    case,
                    "aot_fx_trace",
                    f"{folder}/{len(distances)}/{strategy}",
                    {"context_parallel": strategy},
                )
                for strategy in ("gather", "ring")
            )
        distances.append(_distance(gathered, ring))
    single, double = distances
    return single, double


_Found = tuple[torch.Tensor, dict[str, torch.Tensor]]


def _loss_and_gradients(case: Case, mode: str, folder: str, options: Mapping[str, Any]) -> _Found:
    """Of one batch: the sum of the ranks' losses, and whole gradients by parameter, in float64."""
    trainer = trainer_of(case, mode, folder, options=options)
    loss = trainer.forward_backward_step(**batch_of_documents(trainer, length=case.seq_len))
    total = local(loss).double()
    dist.all_reduce(total, group=trainer.parallel_dims.get_mesh("loss").get_group())
    gradients = {name: _whole(parameter.grad) for name, parameter in _parameters(trainer).items()}
    close(trainer)
    return total, gradients


def _distance(expected: _Found, found: _Found) -> Distance:
    assert expected[1].keys() == found[1].keys()
    return Distance(
        loss=abs((found[0] / expected[0] - 1).item()),
        gradients={
            name: ((found[1][name] - value).norm() / value.norm()).item()
            for name, value in expected[1].items()
        },
    )


def batch_of_documents(trainer: GraphTrainer, *, length: int) -> dict[str, Any]:
    """Two samples of several documents that begin nowhere in particular."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(2048, (2, length), generator=generator)
    positions = torch.arange(length).repeat(2, 1)
    for sample, starts in enumerate(((0.3, 0.45, 0.8), (0.65,))):
        for start in starts:
            first = int(start * length)
            positions[sample, first:] = torch.arange(length - first)
    labels = tokens.roll(-1, dims=1)
    labels[:, ::7] = -100
    return _inputs(trainer, tokens, positions, labels)


def _inputs(
    trainer: GraphTrainer, tokens: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor
) -> dict[str, Any]:
    dims = trainer.parallel_dims
    return {
        "input_dict": {"input": tokens, "positions": positions},
        "labels": labels,
        "global_valid_tokens": (labels != -100).sum() * dims.dp_replicate * dims.dp_shard,
    }


def _parameters(trainer: GraphTrainer) -> dict[str, Any]:
    return dict(trainer.model_parts[0].named_parameters())


def _whole(gradient: Any) -> torch.Tensor:
    whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return whole.double()


# ---- documents -----------------------------------------------------------------------------------

DOCUMENTS: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = MappingProxyType(
    {
        "one": ((), ()),
        "at the cuts": ((16, 32, 48), (32,)),
        "beside the cuts": ((15, 33), (17, 31, 47, 49)),
        "of one token": (tuple(range(1, LENGTH)), (31, 32, 33)),
        "many and one": ((3, 5, 6, 21, 22, 40, 41, 60), (63,)),
        "of an earlier sample first": ((0, 20, 44), (0, 50)),
    }
)
"""Where documents begin in two samples of 64 tokens, of which two ranks have halves or quarters.
A sample begins with one, but for the last, whose first token is the seventh of its document."""


def compare_documents(
    case: Case, folder: str, strategy: str
) -> tuple[tuple[str, ...], dict[str, float]]:
    """The same tokens in other documents each time, captured once.

    Returns:
        What is not bitwise that of eager steps; and the loss over all ranks, by documents.
    """
    options = {"context_parallel": strategy}
    runs = {}
    for mode in ("none", "aot_fx_trace"):
        trainer = trainer_of(case, mode, f"{folder}/{mode}", options=options)
        for starts in DOCUMENTS.values():
            trainer.optimizers.zero_grad()
            trainer.forward_backward_step(**_batch_of(trainer, starts))
        runs[mode] = trainer.passes
        close(trainer)
    differences: list[str] = []
    losses = {}
    for name, eager, captured in zip(DOCUMENTS, *runs.values(), strict=True):
        differences += differing_passes(eager, captured, name)
        total = captured.loss.double()
        dist.all_reduce(total)
        losses[name] = total.item()
    return tuple(differences), losses


def losses_of_documents(case: Case, folder: str) -> dict[str, float]:
    """The same eagerly, by one rank."""
    trainer = trainer_of(case, "none", folder)
    losses = {
        name: local(trainer.forward_backward_step(**_batch_of(trainer, starts))).item()
        for name, starts in DOCUMENTS.items()
    }
    close(trainer)
    return losses


def _batch_of(
    trainer: GraphTrainer, starts_of_samples: tuple[tuple[int, ...], ...]
) -> dict[str, Any]:
    tokens = torch.randint(2048, (2, LENGTH), generator=torch.Generator().manual_seed(9))
    positions = torch.arange(LENGTH).repeat(2, 1)
    for sample, starts in enumerate(starts_of_samples):
        if 0 in starts:
            positions[sample] += 7
        for start in filter(None, starts):
            positions[sample, start:] = torch.arange(LENGTH - start)
    labels = tokens.roll(-1, dims=1)
    labels[:, ::7] = -100
    return _inputs(trainer, tokens, positions, labels)


# ---- who sees whom -------------------------------------------------------------------------------


def losses_of_changed_tokens(
    case: Case, mode: str, folder: str, options: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, float]:
    """The loss at tokens of one document up to a token, with others changed, by what was changed."""
    trainer = trainer_of(case, mode, folder, options=options)
    tokens = torch.randint(2048, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(LENGTH).repeat(2, 1)
    for start in (DOCUMENT.start, DOCUMENT.stop):
        positions[:, start:] = torch.arange(LENGTH - start)
    labels = torch.full_like(tokens, -100)
    labels[:, DOCUMENT.start : PROBE + 1] = 5
    changes = {
        "nothing": slice(0, 0),
        "the document before": slice(0, DOCUMENT.start),
        "the document after": slice(DOCUMENT.stop, LENGTH),
        "later tokens": slice(PROBE + 1, DOCUMENT.stop),
        "earlier tokens": slice(DOCUMENT.start, DOCUMENT.start + 2),
    }
    losses = {}
    for name, place in changes.items():
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1000) % 2048
        loss = trainer.forward_backward_step(**_inputs(trainer, changed, positions, labels))
        total = local(loss)
        dist.all_reduce(total, group=trainer.parallel_dims.get_mesh("loss").get_group())
        losses[name] = total.item()
        trainer.optimizers.zero_grad()
    close(trainer)
    return losses


# ---- options, validation -------------------------------------------------------------------------


def compare_options(
    case: Case, folder: str, variants: Mapping[str, Mapping[str, Any]]
) -> dict[str, VariantResult]:
    """Captured runs with options of ``--compile`` against one eager run."""
    return compare_variants(case, folder, variants)


def reported(case: Case, folder: str) -> list[tuple[float, float]]:
    """Train two steps with a validation after each; mean and largest loss, on rank 0."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size)
    config = case.build("aot_fx_trace", folder)
    config.training.steps = 2
    config.validator = dataclasses.replace(config.validator, enable=True, freq=1, steps=2)
    trainer = GraphTrainer(config)
    trainer.train()
    trainer.close()
    if rank != "0":
        return []
    lines = [
        json.loads(line)
        for name in ("metrics.jsonl", "validation.jsonl")
        for line in Path(folder, name).read_text().splitlines()
    ]
    return [(line.get("loss", line.get("validation_loss")), line.get("max_loss")) for line in lines]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """Two steps of a run beside those of one that stores nothing."""

    differences: tuple[str, ...]
    losses: tuple[float, ...]
    is_loaded: bool


def compare_stored_graphs(case: Case, folder: str, strategy: str) -> tuple[StoredRun, StoredRun]:
    """A run that stores what it captures, and the next, which loads it: every bit of one without."""
    options = {"context_parallel": strategy}
    plain = _two_steps(case, f"{folder}/plain", options)
    close(plain)
    found = []
    for number in range(2):
        stored = {**options, "artifacts": f"{folder}/graphs"}
        trainer = _two_steps(case, f"{folder}/{number}", stored)
        differences = differing(plain.parameters(), trainer.parameters(), "parameter")
        for a, b in zip(plain.passes, trainer.passes, strict=True):
            differences += differing_passes(a, b, "pass")
        (report,) = trainer.training_step.reports
        found.append(
            StoredRun(
                differences=tuple(differences),
                losses=tuple(each.loss.item() for each in trainer.passes),
                is_loaded=getattr(report, "is_loaded", False),
            )
        )
        close(trainer)
    cold, warm = found
    return cold, warm


def _two_steps(case: Case, folder: str, options: Mapping[str, Any]) -> RecordingTrainer:
    trainer = trainer_of(case, "aot_fx_trace", folder, options=options)
    trainer.take_step()
    trainer.take_step()
    return trainer
