"""Training with modules in chunks against training without. Workers import this by name."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from float64_runs import float64_for_float32
from imitated_devices import imitated_recordings, symmetric_memory_of_cpus
from training_cases import (
    BATCH_SIZE,
    Case,
    Pass,
    RecordingTrainer,
    close,
    differing,
    same,
    take_unseen,
    trainer_of,
    unseen_batches,
)

from gt_config import EpOverlapConfig
from gt_passes.ep_overlap import ChunkRegions, exposed_exchanges, interrupted_exchanges

__all__ = [
    "ChunkedTraining",
    "compare_chunked",
    "relative_difference",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedTraining:
    """What a rank found of one run in chunks."""

    largest_difference: float
    """From the run without chunks, over the loss and the gradients of passes with the same
    weights: the norm of the difference of a tensor, divided by the norm of the tensor."""

    differing_buffers: tuple[str, ...]
    """Buffers that are not bitwise those of the run without chunks."""

    largest_of: str
    """Where that is."""

    largest_difference_of_whole: float
    """The same, by the norms of gradients over all ranks: experts that no token goes to have none,
    so that a rank's part of a router's gradient may be nothing but what rounding left of zero."""

    is_bitwise: bool
    """Whether nothing differs at all, so that perhaps nothing was chunked."""

    regions: tuple[tuple[str, str, int], ...]
    """Root, direction and number of chunks of every region, after all passes; of each graph."""

    exposed: tuple[str, ...]
    """Exchanges behind which no other chunk computes, and those that FSDP interrupts."""

    changed: frozenset[str]
    """Passes that edited the graph."""

    num_replays: int
    """Of imitated recordings."""

    num_captures: int
    verified: bool


def compare_chunked(
    case: Case,
    folder: str,
    runs: Mapping[str, tuple[EpOverlapConfig, Mapping[str, Any]]],
    lengths: tuple[int, ...],
) -> dict[str, ChunkedTraining]:
    """Make passes without chunks, and in chunks once for each run, from the same weights.

    Without optimizer steps, which would let the weights drift apart; on batches with documents
    that differ, uneven loads and idle experts.

    Args:
        case: without EP overlap.
        folder: for dump folders.
        runs: EP overlap and other options of ``--compile``, by name.
        lengths: of the sequences; three batches are taken of each.
    """
    eager = _train(case, "none", f"{folder}/whole", {}, lengths)
    whole = eager.passes
    close(eager)
    found = {}
    for number, (name, (overlap, options)) in enumerate(runs.items()):
        asked = {**options, "ep_overlap": overlap}
        with imitated_recordings() as recorders, contextlib.ExitStack() as devices:
            if "async_tensor_parallel" in options:
                devices.enter_context(symmetric_memory_of_cpus())
            chunked = _train(case, "aot_fx_trace", f"{folder}/{number}", asked, lengths)
            num_replays = sum(each.num_replays for each in recorders)
            found[name] = _compare(whole, chunked, num_replays)
            close(chunked)
    return found


def compare_chunked_in_float64(
    case: Case,
    folder: str,
    runs: Mapping[str, tuple[EpOverlapConfig, Mapping[str, Any]]],
    lengths: tuple[int, ...],
) -> dict[str, ChunkedTraining]:
    """``compare_chunked`` where nothing is rounded to float32."""
    with float64_for_float32():
        return compare_chunked(case, folder, runs, lengths)


def error_of_an_odd_batch(case: Case, folder: str, overlap: EpOverlapConfig) -> str:
    """What a step says that is captured anew for a batch with one sample less."""
    trainer = trainer_of(case, "aot_fx_trace", folder, options={"ep_overlap": overlap})
    length = case.seq_len
    trainer.forward_backward_step(**unseen_batches((BATCH_SIZE, length))[0])
    try:
        trainer.forward_backward_step(**unseen_batches((BATCH_SIZE, length - 1))[0])
    except ValueError as error:
        return str(error)
    finally:
        close(trainer)
    return "no error"


def _train(
    case: Case, mode: str, folder: str, options: Mapping[str, Any], lengths: tuple[int, ...]
) -> RecordingTrainer:
    trainer = trainer_of(case, mode, folder, options=options)
    for length in lengths:
        take_unseen(trainer, length=length)
    return trainer


def _compare(whole: list[Pass], chunked: RecordingTrainer, num_replays: int) -> ChunkedTraining:
    relative: dict[str, float] = {}
    relative_of_whole: list[float] = []
    buffers: list[str] = []
    bitwise = True
    for number, (a, b) in enumerate(zip(whole, chunked.passes, strict=True)):
        assert a.gradients.keys() == b.gradients.keys()
        pairs = {"loss": (a.loss, b.loss)}
        pairs |= {name: (a.gradients[name], b.gradients[name]) for name in a.gradients}
        bitwise = bitwise and all(same(*pair) for pair in pairs.values())
        relative |= {f"pass {number} {n}": relative_difference(*p) for n, p in pairs.items()}
        relative_of_whole += [_relative_difference_of_whole(*pair) for pair in pairs.values()]
        buffers += differing(a.buffers, b.buffers, f"pass {number}")
    largest_of = max(relative, key=relative.__getitem__)
    graphs = [graph for report in chunked.training_step.reports for graph in report.graph_modules]
    regions = [region for graph in graphs for region in ChunkRegions.of(graph).regions]
    exposed = [str(exchange) for graph in graphs for exchange in exposed_exchanges(graph)]
    exposed += [str(pair) for graph in graphs for pair in interrupted_exchanges(graph)]
    pipelines = [pipeline for report in chunked.training_step.reports for pipeline in report.passes]
    return ChunkedTraining(
        largest_difference=relative[largest_of],
        largest_of=largest_of,
        largest_difference_of_whole=max(relative_of_whole),
        differing_buffers=tuple(buffers),
        is_bitwise=bitwise,
        regions=tuple((r.root, r.direction, r.num_chunks) for r in regions),
        exposed=tuple(exposed),
        changed=frozenset(r.name for p in pipelines for r in p.records if r.report.changed),
        num_replays=num_replays,
        num_captures=len(chunked.training_step.reports),
        verified=all(pipeline.verified for pipeline in pipelines),
    )


def relative_difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    """The norm of the difference divided by the norm of what is expected; where that is zero, the
    norm of the difference. Infinite where either holds what is no finite number, which comparisons
    with a bound would let pass."""
    difference = found.double() - expected.double()
    return _ratio(difference.norm().item(), expected.double().norm().item())


def _relative_difference_of_whole(expected: torch.Tensor, found: torch.Tensor) -> float:
    """``relative_difference`` of what all ranks hold parts of."""
    difference = found.double() - expected.double()
    squares = torch.stack([difference.square().sum(), expected.double().square().sum()])
    dist.all_reduce(squares)
    return _ratio(*squares.sqrt().tolist())


def _ratio(difference: float, norm: float) -> float:
    relative = difference / norm if norm > 0 else difference
    return relative if math.isfinite(relative) else math.inf
