"""One start of a training step: ``python -m artifacts.one_start WAY WORKLOAD LAYERS FILE``.

WAY is ``capture`` (capture, passes with their verifier, and then the file is written, which is told
apart) or ``load`` (read the file, decode and verify it). Prints one line of JSON: CPU seconds by
part, nodes, bytes of the file. Building and placing the model is not counted, nor are imports.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gt_trainer import device
from gt_trainer.steps.program import TracingOptions, capture_program

device.install("cpu")  # before the imports below, whose modules copy their device

from capture.workloads import WORKLOADS  # noqa: E402

from gt_passes import DescribeOnly, Verifier  # noqa: E402
from gt_trace import load, save  # noqa: E402
from gt_trace.garbage_collection import held_garbage_collection  # noqa: E402
from gt_trainer.dry_run.fake_step import FakeStep, fake_step  # noqa: E402
from gt_trainer.startup import StartupClock  # noqa: E402
from gt_trainer.steps.captured_step import whole_step  # noqa: E402
from gt_trainer.steps.recipe import Recipe  # noqa: E402

__all__ = ["main"]


def main(way: str, workload: str, num_layers: str, file: str) -> None:
    """Start once and print what it took."""
    chosen = WORKLOADS[workload]
    config = getattr(importlib.import_module("gt_trainer.models.llama3"), chosen.config)()
    config.parallelism = dataclasses.replace(
        config.parallelism, tensor_parallel_degree=chosen.tensor_parallel_degree
    )
    published = config.model_spec.model.layers
    config.model_spec.model.layers = [
        copy.deepcopy(published[index % len(published)]) for index in range(int(num_layers))
    ]
    parts: dict[str, float] = {}
    with fake_step(config, chosen.world_size) as step:
        start = _capture if way == "capture" else _load
        record = start(config, step, Path(file), parts)
    record = {"parts": parts, "file_bytes": Path(file).stat().st_size, **record}
    sys.stdout.write(json.dumps(record) + "\n")


def _capture(config: Any, step: FakeStep, file: Path, parts: dict[str, float]) -> dict[str, Any]:
    with _timed(parts, "capture and passes"):
        report = capture_program(
            whole_step(
                step.model,
                step.loss_fn,
                *step.inputs,
                options=TracingOptions(meta_device=step.meta_device),
            ),
            recipe=Recipe(options=config.compile, compiler=DescribeOnly()),
            clock=StartupClock(),
        )
    with _timed(parts, "write"):
        save(report.program.captured, file)
    return {"nodes": len(report.program.captured.graph_module.graph.nodes)}


def _load(config: Any, step: FakeStep, file: Path, parts: dict[str, float]) -> dict[str, Any]:
    with _timed(parts, "read and decode"):
        traced = load(file, step.model)
    with _timed(parts, "verify"):
        verified = Verifier().verify(traced.graph_module)
    if verified.problems:
        raise RuntimeError(f"the loaded graph is broken: {verified.problems[0]}")
    return {"nodes": len(traced.graph_module.graph.nodes)}


@contextmanager
def _timed(parts: dict[str, float], name: str) -> Iterator[None]:
    begin = time.process_time()
    with held_garbage_collection():  # as a run of passes does
        yield
    parts[name] = time.process_time() - begin


if __name__ == "__main__":
    main(*sys.argv[1:])
