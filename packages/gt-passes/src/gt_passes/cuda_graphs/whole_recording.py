"""The mark on a graph that all of it can be recorded, for whoever runs it to record it.

A pipeline's stage runs one graph for many microbatches at a time, and knows where each keeps its
values; a pass does not. So the pass judges, and the stage records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.fx import GraphModule

from gt_passes.cuda_graphs.cuda_graph_replay import Recorder

_KEY = "gt.whole_recording"


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRecording:
    """How a graph is to be recorded."""

    new_recorder: Callable[[], Recorder]
    num_warmup_runs: int
    """Runs of the graph before it is recorded."""

    max_recordings: int
    """How often parameters may be replaced before that is an error."""

    alone: bool = True
    """Whether a launch of its own is worth it; else only as part of a recording of a whole step."""


def mark_for_recording(graph_module: GraphModule, recording: WholeRecording) -> None:
    """Say that all of a graph can be recorded."""
    graph_module.meta[_KEY] = recording


def whole_recording(graph_module: GraphModule) -> WholeRecording | None:
    """How all of a graph is to be recorded; None if it was not marked."""
    found = graph_module.meta.get(_KEY)
    assert found is None or isinstance(found, WholeRecording)
    return found
