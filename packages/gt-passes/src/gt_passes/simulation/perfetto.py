"""A simulated timeline as a file that Perfetto and chrome://tracing open.

The format is Chrome's *Trace Event Format*, JSON: one process for the device, one thread for each
stream, complete events ("X") in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gt_config.node_keys import ChunkAnnotation
from gt_passes.simulation.step_simulation import StepSimulation
from gt_passes.simulation.timeline import Timeline
from gt_trace.node_metadata import module_fqn, phase_of, read_annotation


def trace_events(
    timeline: Timeline, *, arguments: Sequence[dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """The events of a timeline; tasks that take no time are left out.

    Args:
        timeline: what ran when.
        arguments: for each task, what is shown when it is selected.
    """
    streams = list(dict.fromkeys(task.stream for task in timeline.tasks))
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "simulated device"}}
    ]
    for thread, stream in enumerate(streams):
        events.append(
            {
                "ph": "M",
                "name": "thread_name",
                "pid": 0,
                "tid": thread,
                "args": {"name": f"{stream} (simulated)"},
            }
        )
    for position, task in enumerate(timeline.tasks):
        if task.duration_us == 0:
            continue
        event = {
            "ph": "X",
            "name": task.name,
            "pid": 0,
            "tid": streams.index(task.stream),
            "ts": timeline.start_us[position],
            "dur": timeline.end_us[position] - timeline.start_us[position],
        }
        if arguments is not None:
            event["args"] = arguments[position]
        events.append(event)
    return events


def write_perfetto_trace(simulation: StepSimulation, path: Path) -> None:
    """Write a simulated step; the folder is made if missing.

    Each event carries operator, module, phase, chunk, bytes, FLOPs, and what it takes alone.
    """
    arguments = [
        {
            "operator": str(node.target),
            "module": module_fqn(node),
            "phase": phase_of(node),
            "chunk": None if chunk is None else chunk.chunk_id,
            "bytes": cost.moved_bytes,
            "flops": cost.flops,
            "bound": cost.bound,
            "alone_us": cost.duration_us,
        }
        for node, cost in zip(simulation.run.nodes, simulation.run.costs, strict=True)
        for chunk in [read_annotation(node, ChunkAnnotation)]
    ]
    document = {
        "displayTimeUnit": "ms",
        "otherData": {"simulated": True, "hardware": simulation.hardware.name},
        "traceEvents": trace_events(simulation.run.timeline, arguments=arguments),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document), encoding="utf-8")
