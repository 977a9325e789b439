"""Graphs and the summary of passes in PyTorch's structured trace, where ``tlparse`` shows them.

With the environment variable ``TORCH_TRACE`` naming a folder, PyTorch writes one log a process
there, in which each record may carry a text. ``tlparse FOLDER`` makes web pages of them. Without
it, nothing is made and nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable

from gt_passes._torch_internals import trace_structured


def trace_text(name: str, text: Callable[[], str]) -> None:
    """Put a text into the trace, if there is one; ``text`` is not called without."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=text,
        # Passes run outside of torch.compile, which hands out the ids.
        expect_trace_id=False,
    )
