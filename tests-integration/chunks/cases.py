"""Chunks of either producer against the whole model, over optimizer steps. Workers import this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from chunks.combination_cases import relative_difference
from chunks.recorded_routing import BUFFER, Load, follow_record, tokens_of, write_record
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule
from training_cases import (
    Case,
    RecordingTrainer,
    close,
    differing,
    differing_passes,
    same,
    trainer_of,
)

from gt_config import EpOverlapConfig
from gt_passes.ep_overlap import ChunkRegions, exposed_exchanges
from gt_passes.ep_overlap.exchange_operators import is_token_exchange

__all__ = ["LOADS", "SteppedTraining", "train_in_chunks"]

LOADS: tuple[Load, ...] = (
    "as recorded",
    "uneven",
    "an expert without tokens",
    "a rank without tokens",
    "as recorded",
)
"""Of each optimizer step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SteppedTraining:
    """What a rank found. What it looked at is there too, so that no empty comparison passes."""

    differences: tuple[str, ...]
    """Losses, gradients, buffers and parameters that are not bitwise those of the first run in
    chunks."""

    furthest: float
    """From the whole model with the same parameters, over losses and gradients of all steps: the
    norm of the difference of a tensor, divided by the norm of the tensor."""

    furthest_of: str
    miscounted: tuple[str, ...]
    """Buffers of the first run that are not bitwise those of the whole model."""

    is_bitwise: bool
    """Whether the first run is the whole model's in every bit, so that perhaps nothing was cut."""

    tokens: tuple[tuple[tuple[int, ...], ...], ...]
    """By step and layer, tokens of this rank for each expert; of the last pass of a step."""

    losses: tuple[float, ...]
    exchanges: Mapping[str, Mapping[tuple[str, str], tuple[int, ...]]]
    """By run, and by root and direction of a region: exchanges of tokens in each chunk."""

    chunk_sizes: Mapping[str, tuple[int, ...]]
    """By run with chunks made on the graph, their extents in the batch or the sequence."""

    exposed: tuple[str, ...]
    """Exchanges in any of the graphs behind which no other chunk computes."""

    changed: frozenset[str]
    """Passes that edited every graph."""

    verified: bool


def train_in_chunks(
    case: Case,
    folder: str,
    runs: Mapping[str, EpOverlapConfig],
    options: Mapping[str, Any],
) -> SteppedTraining:
    """Take five optimizer steps in chunks, once for each run, and watch the whole model do them.

    The runs in chunks train freely. Before each of their steps, the whole model, which runs eagerly,
    gets the parameters of the first of them, and its routing is recorded for them to follow.

    Args:
        case: without EP overlap and tensor parallelism.
        folder: for dump folders.
        runs: how chunks are made, by name.
        options: others of ``--compile``, of the runs in chunks.
    """
    whole = trainer_of(case, "none", f"{folder}/whole")
    chunked = {
        name: trainer_of(
            case, "aot_fx_trace", f"{folder}/{n}", options={**options, "ep_overlap": overlap}
        )
        for n, (name, overlap) in enumerate(runs.items())
    }
    first = next(iter(chunked.values()))
    shape = {"batch_size": case.batch_size, "seq_len": case.seq_len}
    records = follow_record(whole.model_parts[0], **shape, records=True)
    for name, trainer in chunked.items():
        num_chunks = runs[name].num_chunks if runs[name].strategy == "eager" else 1
        follow_record(trainer.model_parts[0], **shape, num_chunks=num_chunks)
        trainer.before_pass = _Replay(whole, trainer)

    differences: list[str] = []
    miscounted: list[str] = []
    relative: dict[str, float] = {}
    bitwise = True
    tokens, losses = [], []
    for step, load in enumerate(LOADS, start=1):
        _take_over(whole, first)
        records(load == "as recorded")
        if load != "as recorded":
            ep = case.parallelism["expert_parallel_degree"]
            write_record(whole.model_parts[0], load, num_ranks=ep)
        for trainer in (whole, *chunked.values()):
            trainer.passes = []
            trainer.take_step()
        for number, (a, b) in enumerate(zip(whole.passes, first.passes, strict=True)):
            where = f"step {step}, pass {number}"
            assert a.gradients.keys() == b.gradients.keys()
            pairs = {f"{where} loss": (a.loss, b.loss)}
            pairs |= {f"{where} {n}": (a.gradients[n], b.gradients[n]) for n in a.gradients}
            relative |= {name: relative_difference(*pair) for name, pair in pairs.items()}
            bitwise = bitwise and all(same(*pair) for pair in pairs.values())
            miscounted += differing(a.buffers, b.buffers, where)
            losses.append(b.loss.item())
        counts = tokens_of(first.passes[-1].buffers)
        tokens.append(tuple(tuple(map(int, count_E)) for count_E in counts))
        for name, other in chunked.items():
            for number, (a, b) in enumerate(zip(first.passes, other.passes, strict=True)):
                differences += differing_passes(a, b, f"{name}, step {step}, pass {number}")
            differences += differing(
                first.parameters(), other.parameters(), f"{name}, after step {step}"
            )
    graphs = {name: _graph_of(trainer) for name, trainer in chunked.items()}
    furthest_of = max(relative, key=relative.__getitem__)
    found = SteppedTraining(
        differences=tuple(differences),
        furthest=relative[furthest_of],
        furthest_of=furthest_of,
        miscounted=tuple(miscounted),
        is_bitwise=bitwise,
        tokens=tuple(tokens),
        losses=tuple(losses),
        exchanges={name: _exchanges(graph) for name, graph in graphs.items()},
        chunk_sizes={
            name: _chunk_sizes(graphs[name])
            for name, overlap in runs.items()
            if overlap.strategy == "graph"
        },
        exposed=tuple(
            f"{name}: {each}" for name, graph in graphs.items() for each in exposed_exchanges(graph)
        ),
        changed=frozenset.intersection(*map(_changed, chunked.values())),
        verified=all(
            r.passes[0].verified for t in chunked.values() for r in t.training_step.reports
        ),
    )
    close(whole, *chunked.values())
    return found


class _Replay:
    """Gives a trainer the routing of the same pass of another."""

    def __init__(self, recorded: RecordingTrainer, trainer: RecordingTrainer) -> None:
        self._recorded = recorded
        self._trainer = trainer

    def __call__(self) -> None:
        record = self._recorded.passes[len(self._trainer.passes)].buffers
        for name, buffer in self._trainer.model_parts[0].named_buffers():
            if name.endswith(BUFFER):
                buffer.copy_(record[name])


def _take_over(to: RecordingTrainer, of: RecordingTrainer) -> None:
    """Give one model the parameters and buffers of another."""
    with torch.no_grad():
        for kind in ("named_parameters", "named_buffers"):
            theirs = dict(getattr(of.model_parts[0], kind)())
            for name, own in getattr(to.model_parts[0], kind)():
                _local(own).copy_(_local(theirs[name]))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _graph_of(trainer: RecordingTrainer) -> GraphModule:
    (report,) = trainer.training_step.reports
    (graph_module,) = report.graph_modules
    return graph_module


def _changed(trainer: RecordingTrainer) -> frozenset[str]:
    (report,) = trainer.training_step.reports
    return frozenset(each.name for each in report.passes[0].records if each.report.changed)


def _exchanges(graph_module: GraphModule) -> dict[tuple[str, str], tuple[int, ...]]:
    return {
        (region.root, region.direction): tuple(
            sum(map(is_token_exchange, region.launches(chunk_id)))
            for chunk_id in range(region.num_chunks)
        )
        for region in ChunkRegions.of(graph_module).regions
    }


def _chunk_sizes(graph_module: GraphModule) -> tuple[int, ...]:
    first = ChunkRegions.of(graph_module).regions[0]
    cut = next(n for n in first.splits if n.target is torch.ops.aten.split_with_sizes.default)
    return tuple(cut.args[1])
