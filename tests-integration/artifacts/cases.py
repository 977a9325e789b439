"""What the workers of ``test_shared_captures.py`` run: training with graphs from a folder."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch._dynamo.utils
from pipelines.batches import (
    LocalAdamW,
    local_parameters,
    microbatches,
    set_weights,
    taken_gradients,
)
from pipelines.cases import PipelineCase, evaluate, step_losses
from torchtitan.tools.logging import logger
from training_cases import NUM_STEPS, Case, close, trainer_of

from gt_trace import graph_text
from gt_trainer.dry_run.fake_step import fake_ranks
from gt_trainer.precompile.precompile import PrecompileReport, precompile


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a rank saw of five optimizer steps."""

    bits: tuple[str, ...]
    """Digests of loss, gradients and buffers of each pass, and of the parameters in the end."""

    losses: tuple[float, ...]
    num_gradients: int
    is_loaded: bool
    """Whether the graph came from the folder."""

    passes: tuple[str, ...]
    """Names of the passes of the first graph."""

    graphs: tuple[str, ...]
    """Text of each graph that ran, without names of process groups."""

    log: tuple[str, ...]
    """What was said of artifacts."""

    def texts(self, numbered: bool) -> tuple[str, ...]:
        """The graphs; unless ``numbered``, without the numbers in names of nodes.

        Of a joint graph ranks number the pieces that they make of a tensor and do not need.
        """
        if numbered:
            return self.graphs
        return tuple(re.sub(r"\b([a-z_]+)_\d+\b", r"\1", each) for each in self.graphs)


class _Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("--compile.artifacts"):
            self.lines.append(text)


@contextmanager
def _listening() -> Iterator[list[str]]:
    """Gather what is said of artifacts."""
    said = _Said()
    logger.addHandler(said)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield said.lines
    finally:
        logger.removeHandler(said)
        logger.setLevel(level)


def trained(
    case: Case,
    folder: str,
    artifacts: str | None,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Trained:
    """Train on this worker's rank, with graphs from ``artifacts`` if that is not None."""
    with _listening() as said:
        trainer = trainer_of(
            case, "aot_fx_trace", folder, options={**options, "artifacts": artifacts}
        )
        for _ in range(NUM_STEPS):
            trainer.take_step()
    bits = [
        _digest({"loss": each.loss, **each.gradients, **each.buffers}) for each in trainer.passes
    ]
    reports = trainer.training_step.reports
    found = Trained(
        bits=(*bits, _digest(trainer.parameters())),
        losses=tuple(each.loss.item() for each in trainer.passes),
        num_gradients=min(len(each.gradients) for each in trainer.passes),
        is_loaded=any(line.startswith("--compile.artifacts: loaded") for line in said),
        passes=tuple(record.name for record in reports[0].passes[0].records),
        graphs=tuple(graph_text(each) for each in reports[0].graph_modules),
        log=tuple(said),
    )
    close(trainer)
    return found


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def trained_in_stages(case: PipelineCase, folder: str, artifacts: str | None) -> Trained:
    """Evaluate and train in pipeline stages, with graphs from ``artifacts`` if that is not None."""
    case = dataclasses.replace(case, options={**case.options, "artifacts": artifacts})
    with _listening() as said:
        trainer = case.trainer("aot_fx_trace", folder)
        parts = trainer.model_parts
        for part in parts:
            set_weights(part)
        optimizer = LocalAdamW(parts)
        bits: list[str] = []
        losses: list[float] = []
        counts: list[int] = []
        for batch in range(NUM_STEPS):
            evaluated = evaluate(trainer, microbatches(trainer, batch))
            found = step_losses(trainer, batch)
            gradients = taken_gradients(parts)
            numbers = {f"loss {n}": each for n, each in enumerate((*evaluated, *found))}
            bits.append(_digest({**numbers, **gradients}))
            losses += [loss.item() for loss in (*evaluated, *found)]
            counts.append(len(gradients))
            optimizer.step(gradients)
    reports = trainer.training_step.reports
    result = Trained(
        bits=(*bits, _digest(local_parameters(parts))),
        losses=tuple(losses),
        num_gradients=min(counts),
        is_loaded=all(each.is_loaded for each in reports),
        passes=tuple(record.name for r in reports for p in r.passes for record in p.records),
        graphs=tuple(_renumbered(graph_text(g)) for each in reports for g in each.graph_modules),
        log=tuple(said),
    )
    trainer.close()
    return result


def _renumbered(text: str) -> str:
    """With sizes at run time numbered as they appear: stages share the numbers of one fake mode."""
    names: dict[str, str] = {}
    return re.sub(r"\bu\d+\b", lambda found: names.setdefault(found[0], f"u{len(names)}"), text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What a rank compiled with Inductor."""

    trained: Trained
    hits: int
    """Graphs that Inductor found in its caches."""

    misses: int


def compiled(case: Case, folder: str, artifacts: str, options: Mapping[str, Any]) -> Compiled:
    """Train with a cache of Inductor's that nobody has used before."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
    counters = torch._dynamo.utils.counters
    counters.clear()
    result = trained(case, folder, artifacts, options)
    found = {**counters["aot_autograd"], **counters["inductor"]}
    return Compiled(
        trained=result,
        hits=found.get("autograd_cache_hit", 0) + found.get("fxgraph_cache_hit", 0),
        misses=found.get("autograd_cache_miss", 0) + found.get("fxgraph_cache_miss", 0),
    )


def precompiled(
    case: Case | PipelineCase,
    folder: str,
    artifacts: str,
    world_size: int,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> PrecompileReport:
    """Store the graphs of ranks that do not exist."""
    mode = options.get("mode", "aot_fx_trace")
    asked = {**options, "artifacts": artifacts}
    with fake_ranks(world_size):
        if isinstance(case, PipelineCase):
            case = dataclasses.replace(case, options={**case.options, **asked})
            config = case.build(mode, folder)
        else:
            config = case.build(mode, folder, options=asked)
    return precompile(config, world_size)
