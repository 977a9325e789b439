"""What the workers of ``test_pipelined_training.py`` run: one batch in stages, and without."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from chunks.recorded_routing import Load, follow_record, write_record
from flex_attention.cases import own_flex_attention
from pipelines.batches import (
    Gradients,
    LocalAdamW,
    Microbatch,
    counts_kept,
    local_parameters,
    microbatches,
    new_loss,
    new_model,
    num_tokens,
    reduced_as,
    schedule_inputs,
    set_weights,
    taken_gradients,
    unequal,
)
from pipelines.exchanges import Exchanges, exchanges_of
from torch import nn
from torch.distributed.pipelining import PipelineStage
from training_cases import Case, differing, local

from gt_config import EpOverlapConfig
from gt_pipeline.schedules import build_pipeline_schedule
from gt_pipeline.split import stage_modules
from gt_trainer.decoder.eager_chunks import chunked_for_capture
from gt_trainer.metrics.metrics_history import read_metrics
from gt_trainer.pipelines.pipeline_plan import PipelinePlan, pipeline_plan
from gt_trainer.trainer import GraphTrainer

NUM_BATCHES = 5
FEW_BATCHES = 2
"""Before an update and after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCase:
    """A debug model on two pipeline ranks times two others, or four."""

    model: Case
    schedule: str
    num_batches: int = NUM_BATCHES
    num_microbatches: int = 4
    microbatch_size: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of ``--compile``."""

    overlap: EpOverlapConfig = field(default_factory=EpOverlapConfig)
    """Of the captured stages. What they are compared with runs eagerly in chunks of the same."""

    load: Load | None = None
    """Where tokens are sent, by records that all routers follow; None: where the model sends them.
    """

    def build(
        self, mode: str, folder: str, *, degrees: Mapping[str, int] | None = None, **checkpoint: Any
    ) -> GraphTrainer.Config:
        """``degrees`` are of parallelism, in place of the case's own."""
        options = {**self.options, "ep_overlap": self.overlap}
        config = self.model.build(mode, folder, options=options, **checkpoint)
        config.training.local_batch_size = self.num_microbatches * self.microbatch_size
        num_accumulated = self.model.gradient_accumulation_steps
        if num_accumulated == 1:
            config.training.global_batch_size = -1  # whatever degrees there are
        else:
            data_ranks = self.model.parallelism["data_parallel_shard_degree"]
            batch_size = config.training.local_batch_size * data_ranks
            config.training.global_batch_size = batch_size * num_accumulated
        config.parallelism = dataclasses.replace(
            config.parallelism,
            pipeline_parallel_degree=2,
            pipeline_parallel_schedule=self.schedule,
            pipeline_parallel_microbatch_size=self.microbatch_size,
        )
        config.parallelism = dataclasses.replace(config.parallelism, **degrees or {})
        return config

    def trainer(self, mode: str, folder: str, **further: Any) -> GraphTrainer:
        """In this worker's process group; ``further`` is as for ``build``."""
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size)
        return GraphTrainer(self.build(mode, folder, **further))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a rank saw."""

    differences: tuple[str, ...]
    num_gradients: int
    losses: tuple[float, ...]
    """On ranks of the last stage: of each microbatch, train and evaluation."""

    actions: tuple[str, ...]
    """Kinds of action whose graphs compute something, of all stages of the rank."""

    exchanges: tuple[Exchanges, ...]
    """Of each graph with chunks, those of pairs included."""


def compare_pipelines(case: PipelineCase, folder: str) -> Found:
    """One optimizer step after another: captured stages, the whole model, and PyTorch's runtime."""
    trainer = case.trainer("aot_fx_trace", folder)
    for part in trainer.model_parts:
        set_weights(part)
    plan = plan_of(trainer)
    whole = new_model(trainer, lambda model: model)
    runtime = TorchRuntime(trainer, plan, case.overlap)
    if case.load is not None:
        follow_load(case, trainer.model_parts, chunked=case.overlap.strategy == "eager")
        follow_load(case, [whole, *runtime.parts], chunked=True)
    loss_of_whole = new_loss(trainer, whole)
    optimizers = [LocalAdamW(each) for each in (trainer.model_parts, [whole], runtime.parts)]
    before = local_parameters(trainer.model_parts)
    differences: list[str] = []
    losses: list[float] = []
    num_gradients = 0
    for batch in range(case.num_batches):
        found_eval = evaluate(trainer, microbatches(trainer, batch))
        found = step_losses(trainer, batch)
        expected_eval, expected, expected_gradients = whole_batch(
            trainer, whole, loss_of_whole, batch, case.overlap
        )
        torch_losses, torch_gradients = runtime.step(batch)
        gradients = taken_gradients(trainer.model_parts)
        expected_here = {name: expected_gradients[name] for name in gradients}
        like = {n: p for part in trainer.model_parts for n, p in part.named_parameters()}
        for title, reference in (("whole", expected_here), ("runtime", torch_gradients)):
            reduced = reduced_as(like, reference, trainer)
            differences += differing(gradients, reduced, f"batch {batch}, {title}: gradient")
        if trainer.pp_has_last_stage:
            differences += unequal(f"batch {batch}, whole", found, expected)
            differences += unequal(f"batch {batch}, runtime", found, torch_losses)
            differences += unequal(f"batch {batch}, evaluation", found_eval, expected_eval)
            losses += [loss.item() for loss in (*found, *found_eval)]
        num_gradients += len(gradients)
        of_whole = reduced_as(dict(whole.named_parameters()), expected_gradients, trainer)
        stages = {n: p for part in runtime.parts for n, p in part.named_parameters()}
        of_runtime = reduced_as(stages, torch_gradients, trainer)
        steps = zip(optimizers, (gradients, of_whole, of_runtime), strict=True)
        for optimizer, reduced in steps:
            optimizer.step(reduced)
    after = local_parameters(trainer.model_parts)
    unmoved = [name for name, parameter in after.items() if torch.equal(parameter, before[name])]
    differences += [f"{name} was not trained" for name in unmoved]
    actions = {
        graph.kind
        for stage in trainer.pp_schedule.stages.values()
        for graph in stage.graphs
        if not graph.is_empty
    }
    exchanges = tuple(
        found for stage in trainer.pp_schedule.stages.values() for found in exchanges_of(stage)
    )
    trainer.close()
    return Found(
        differences=tuple(differences),
        num_gradients=num_gradients,
        losses=tuple(losses),
        actions=tuple(sorted(actions)),
        exchanges=exchanges,
    )


def compare_pipelines_of_flex_attention(case: PipelineCase, folder: str) -> Found:
    """The same of models that keep torchtitan's attention."""
    with own_flex_attention():
        return compare_pipelines(case, folder)


def plan_of(trainer: GraphTrainer) -> PipelinePlan:
    config = trainer.config
    return pipeline_plan(
        config.parallelism,
        num_layers=len(trainer.model_config.layers),
        local_batch_size=config.training.local_batch_size,
    )


# ---- the same batch, three ways ------------------------------------------------------------------


def step_losses(trainer: GraphTrainer, batch: int) -> list[torch.Tensor]:
    """Losses of the microbatches; gradients are left in the parameters."""
    arguments: dict[str, Any] = {"losses": [] if trainer.pp_has_last_stage else None}
    found = microbatches(trainer, batch)
    trainer.pp_schedule.step(
        **schedule_inputs(trainer, found),
        loss_kwargs={"global_valid_tokens": num_tokens()},
        return_outputs=False,
        **arguments,
    )
    return [local(loss) for loss in arguments["losses"] or []]


def evaluate(trainer: GraphTrainer, found: list[Microbatch]) -> list[torch.Tensor]:
    losses: list[torch.Tensor] = []
    trainer.pp_schedule.eval(
        **schedule_inputs(trainer, found), losses=losses if trainer.pp_has_last_stage else None
    )
    return losses


def whole_batch(
    trainer: GraphTrainer,
    model: nn.Module,
    loss_fn: Any,
    batch: int,
    overlap: EpOverlapConfig | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor], Gradients]:
    """Without a pipeline: losses of evaluation and training, gradients before reduction."""
    evaluated, losses = [], []
    for inputs, labels, kwargs in microbatches(trainer, batch):
        with torch.no_grad(), counts_kept(model):
            evaluated.append(loss_fn(model(inputs, **kwargs), labels, None)[0])
    with in_chunks([model], overlap or EpOverlapConfig()):
        for inputs, labels, kwargs in microbatches(trainer, batch):
            loss, _ = loss_fn(model(inputs, **kwargs), labels, num_tokens())
            loss.backward()
            losses.append(local(loss))
    return evaluated, losses, taken_gradients([model], whole=True)


class TorchRuntime:
    """PyTorch's own schedule over the same stages, run by autograd."""

    def __init__(self, trainer: GraphTrainer, plan: PipelinePlan, overlap: EpOverlapConfig) -> None:
        self._trainer = trainer
        self._overlap = overlap
        mesh = trainer.parallel_dims.get_mesh("pp")
        indices = plan.schedule.stages_of_rank(mesh.get_local_rank())
        self.parts = [
            new_model(
                trainer, lambda model, i=i: stage_modules(model, plan.names_per_stage, [i])[i]
            )
            for i in indices
        ]
        stages = [
            PipelineStage(
                part,
                i,
                plan.schedule.num_stages,
                torch.device("cpu"),
                group=mesh.get_group(),
                get_mesh=lambda axes, _: trainer.parallel_dims.get_mesh(list(axes)),
            )
            for i, part in zip(indices, self.parts, strict=True)
        ]
        loss_fn = new_loss(trainer, self.parts[-1])
        self._schedule = build_pipeline_schedule(
            stages,
            num_microbatches=plan.schedule.num_microbatches,
            name=plan.schedule.name,
            loss_fn=lambda *args, **kwargs: loss_fn(*args, **kwargs)[0],
        )

    def step(self, batch: int) -> tuple[list[torch.Tensor], Gradients]:
        losses: list[torch.Tensor] | None = [] if self._trainer.pp_has_last_stage else None
        found = microbatches(self._trainer, batch)
        with in_chunks(self.parts, self._overlap):
            self._schedule.step(
                **schedule_inputs(self._trainer, found),
                losses=losses,
                loss_kwargs={"global_valid_tokens": num_tokens()},
                return_outputs=False,
            )
        return [local(loss) for loss in losses or []], taken_gradients(self.parts, whole=True)


# ---- chunks -------------------------------------------------------------------------------------


@contextmanager
def in_chunks(parts: Sequence[nn.Module], overlap: EpOverlapConfig) -> Iterator[None]:
    """Modules run eagerly in the chunks that ``overlap`` asks for, whoever is to make them."""
    eagerly = dataclasses.replace(overlap, strategy="eager", disable_early_grad_accumulation=False)
    with ExitStack() as wrapped:
        for part in parts:
            wrapped.enter_context(chunked_for_capture(part, eagerly, is_stage=True))
        yield


def follow_load(case: PipelineCase, parts: Sequence[nn.Module], *, chunked: bool) -> None:
    """Let routers follow records of one load; ``chunked``: that see chunks in training."""
    assert case.load is not None
    for part in parts:
        shape = {"batch_size": case.microbatch_size, "seq_len": case.model.seq_len}
        num_chunks = case.overlap.num_chunks if case.overlap.enabled and chunked else 1
        follow_record(part, **shape, num_chunks=num_chunks)
        write_record(part, case.load, num_ranks=case.model.parallelism["expert_parallel_degree"])


# ---- training ------------------------------------------------------------------------------------


def trained_losses(case: PipelineCase, mode: str, folder: str) -> list[float]:
    """Train for two steps; the losses of metrics.jsonl, on rank 0."""
    trainer = case.trainer(mode, folder)
    trainer.config.training.steps = 2
    trainer.train()
    trainer.close()
    dist.barrier()
    if dist.get_rank() != 0:
        return []
    return [record["loss"] for record in read_metrics(Path(folder, "metrics.jsonl"))]
