"""Captured steps that gather parameters in 8 bits, beside those that do not. Workers import this."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node
from training_cases import (
    Case,
    RecordingTrainer,
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
        quantized=_gathered(quantized),
        plain=_gathered(plain),
        verified=all(p.verified for p in quantized.training_step.reports[0].passes),
    )
    close(quantized, plain)
    return found


def _gathered(trainer: RecordingTrainer) -> Gathered:
    (graph_module,) = trainer.training_step.reports[0].graph_modules
    launches = list(_unshards(graph_module))
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
