"""Graphs and the summary of passes in PyTorch's structured trace, where ``tlparse`` shows them.

With the environment variable ``TORCH_TRACE`` naming a folder, PyTorch writes one log a process
there, in which each record may carry a text. ``tlparse FOLDER`` makes web pages of them. Without
it, nothing is made and nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from gt_passes._torch_internals import trace_structured
from gt_passes.pass_manager_report import PassManagerReport

Moment = Literal["before", "after"]


def trace_graph(position: int, pass_name: str, moment: Moment, text: Callable[[], str]) -> None:
    """Put the graph before or after a pass into the trace, if there is one.

    Args:
        position: of the pass among those of its manager, from 0.
        pass_name: registered name.
        moment: of the two.
        text: makes the graph's text; not called without a trace.
    """
    _artifact(f"graph_pass_{position:02d}_{pass_name}_{moment}", text)


def trace_report(report: PassManagerReport) -> None:
    """Put what the passes did, as a table and by operator, into the trace, if there is one."""
    _artifact("graph_passes_summary", lambda: f"{report}\n\n{report.differences()}")


def _artifact(name: str, text: Callable[[], str]) -> None:
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=text,
        # Passes run outside of torch.compile, which hands out the ids.
        expect_trace_id=False,
    )
