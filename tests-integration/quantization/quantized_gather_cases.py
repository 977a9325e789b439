"""Captured steps that gather parameters in 8 bits, beside those that do not. Workers import this."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from pipelines.batches import set_weights, taken_gradients, unequal
from pipelines.cases import PipelineCase, step_losses
from torch.fx import GraphModule, Node
from training_cases import (
    Case,
    close,
    differing,
    differing_passes,
    take_unseen,
    trainer_of,
)

from gt_config.node_keys import FsdpCollectiveAnnotation
from gt_passes._torch_internals import value_of
from gt_passes.analysis.collectives import is_collective, launch_bytes
from gt_trace import read_annotation
from gt_trainer.trainer import GraphTrainer

NUM_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """What a rank gathers of its quantized parameters in a step."""

    bytes_as_quantized: int
    bytes_as_they_are: int
    num_maxima: dict[str, int]
    """All-reduces of maxima, by transformer block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Both:
    """What a rank found."""

    differences: tuple[str, ...]
    losses: tuple[float, ...]
    quantized: Gathered
    plain: Gathered
    refusals: tuple[str, ...]
    """Why parameters are gathered as they are that are read in 8 bits."""

    verified: bool


def compare_gathers(case: Case, folder: str, options: dict[str, object]) -> Both:
    """Two optimizer steps and unseen batches, with quantized gathers and without: every bit."""
    quantized, plain = (
        trainer_of(
            case,
            "aot_fx_trace",
            f"{folder}/{asked}",
            options={**options, "fsdp_quantized_gathers": asked},
        )
        for asked in (True, False)
    )
    for _ in range(NUM_STEPS):
        quantized.take_step()
        plain.take_step()
    take_unseen(quantized, plain, length=case.seq_len)
    differences = differing(quantized.parameters(), plain.parameters(), "final parameter")
    for index, (a, b) in enumerate(zip(quantized.passes, plain.passes, strict=True)):
        differences += differing_passes(a, b, f"pass {index}")
    found = Both(
        differences=tuple(differences),
        losses=tuple(each.loss.item() for each in quantized.passes),
        quantized=_gathered(quantized.training_step.reports[0].graph_modules),
        plain=_gathered(plain.training_step.reports[0].graph_modules),
        refusals=_refusals(quantized),
        verified=all(p.verified for p in quantized.training_step.reports[0].passes),
    )
    close(quantized, plain)
    return found


def compare_pipelined_gathers(case: PipelineCase, folder: str) -> Both:
    """Steps of a schedule, with quantized gathers and without: losses and gradients, every bit."""
    trainers = []
    for asked in (True, False):
        options = {**case.options, "fsdp_quantized_gathers": asked}
        of_options = dataclasses.replace(case, options=options)
        trainer = of_options.trainer("aot_fx_trace", f"{folder}/{asked}")
        for part in trainer.model_parts:
            set_weights(part)
        trainers.append(trainer)
    differences: list[str] = []
    losses: list[float] = []
    for batch in range(NUM_STEPS):
        found, expected = (step_losses(trainer, batch) for trainer in trainers)
        differences += unequal(f"batch {batch}", found, expected)
        gradients, expected_gradients = (taken_gradients(each.model_parts) for each in trainers)
        differences += differing(gradients, expected_gradients, f"batch {batch}: gradient")
        losses += [loss.item() for loss in found]
    quantized, plain = (_gathered(_unshard_graphs(trainer)) for trainer in trainers)
    reports = trainers[0].training_step.reports
    verified = all(each.verified for report in reports for each in report.passes)
    refusals = _refusals(trainers[0])
    for trainer in trainers:
        trainer.close()
    return Both(
        differences=tuple(differences),
        losses=tuple(losses),
        quantized=quantized,
        plain=plain,
        refusals=refusals,
        verified=verified,
    )


def _refusals(trainer: GraphTrainer) -> tuple[str, ...]:
    return tuple(
        refusal.reason
        for report in trainer.training_step.reports
        for passes in report.passes
        for record in passes.records
        if record.name == "quantize-before-gather"
        for refusal in record.report.refusals
    )


def _unshard_graphs(trainer: GraphTrainer) -> list[GraphModule]:
    stages = trainer.pp_schedule.stages.values()
    return [stage.graphs.unshard.graph_module for stage in stages]


def _gathered(graph_modules: Sequence[GraphModule]) -> Gathered:
    launches = [node for each in graph_modules for node in _unshards(each)]
    maxima = [node for node in launches if "all_reduce" in str(node.target)]
    gathers = [node for node in launches if node not in maxima]
    as_bytes = [node for node in gathers if _dtype(node) == torch.uint8]
    return Gathered(
        bytes_as_quantized=sum(map(launch_bytes, as_bytes)),
        bytes_as_they_are=sum(launch_bytes(node) for node in gathers if node not in as_bytes),
        num_maxima=dict(Counter(_block(node) for node in maxima)),
    )


def _unshards(graph_module: GraphModule) -> Iterator[Node]:
    for node in graph_module.graph.nodes:
        annotation = read_annotation(node, FsdpCollectiveAnnotation)
        if is_collective(node) and annotation is not None and annotation.kind == "unshard":
            yield node


def _block(node: Node) -> str:
    annotation = read_annotation(node, FsdpCollectiveAnnotation)
    assert annotation is not None  # _unshards has read it
    (block,) = {".".join(name.split(".")[:2]) for name in annotation.parameter_names}
    return block


def _dtype(node: Node) -> torch.dtype:
    value = value_of(node)
    assert isinstance(value, torch.Tensor)
    return value.dtype
