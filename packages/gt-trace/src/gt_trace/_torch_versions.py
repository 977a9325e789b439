"""What a capture needs of PyTorch and versions from 2.11 to 2.15 have in different ways, or lack.

Each is asked for by its presence, not by a version's number. What all of them have alike is in
``_torch_internals``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.utils.checkpoint
from torch.fx import Node, traceback
from torch.fx.proxy import TracerBase

_non_strict: Any = getattr(torch.compiler, "_non_strict_tracing_context", None)
"""2.11 has no way to say that a step is traced as it runs, not compiled."""


@contextmanager
def non_strict_tracing() -> Iterator[None]:
    """Inside, activation checkpointing computes again what it would in an eager run.

    PyTorch takes a trace for a compilation otherwise, which decides that by itself later: what was
    computed in the forward would be read in the backward.
    """
    if _non_strict is not None:
        with _non_strict():
            yield
        return
    with patch.object(torch.utils.checkpoint, "_is_compiling", lambda *_: False):
        yield


@contextmanager
def traced_backward() -> Iterator[None]:
    """Inside, nodes that autograd's engine makes have their forward's number and are marked so.

    PyTorch has this for ``torch.autograd.grad`` and ``backward`` from 2.13 on, and before for the
    former or for none. Hooks on the autograd graph that is run are what all of them share.
    """
    from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks

    graph: Any = torch.autograd.graph
    run = graph._engine_run_backward

    def run_with_hooks(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        roots = [
            each.node if isinstance(each, graph.GradientEdge) else each.grad_fn for each in outputs
        ]
        setup_stacktrace_preservation_hooks([root for root in roots if root is not None])
        # Those hooks mark what follows a node as the accumulation of its gradient, and take it back
        # where the engine has ended: inside of another backward not at all, so that the rest of the
        # node that runs it would accumulate gradients. A placed model's backward is one node.
        with same_marks_afterwards("stack_trace", "autograd_backward"):
            return run(outputs, *args, **kwargs)

    with (
        patch.object(graph, "_engine_run_backward", run_with_hooks),
        patch.object(torch.autograd, "_engine_run_backward", run_with_hooks),
        nullcontext() if hasattr(traceback, "_mark_autograd_backward") else _marked_nodes(),
    ):
        yield


@contextmanager
def same_marks_afterwards(*keys: str) -> Iterator[None]:
    """Afterwards nodes are marked as before, by these keys of ``torch.fx.traceback``'s meta."""
    current = traceback.get_current_meta()
    outside: dict[str, Any] = {key: current[key] for key in keys if key in current}
    try:
        yield
    finally:
        current = traceback.get_current_meta()
        for key in keys:
            current.pop(key, None)
        current.update(outside)


@contextmanager
def _marked_nodes() -> Iterator[None]:
    """Inside, what those hooks note is written to nodes as from 2.12 on.

    2.11 has no mark of the backward (``meta["autograd_backward"]``), and takes all that follows the
    first accumulation of a gradient for another one, since it does not forget a trace of nothing.
    """
    create_node, set_stack_trace = TracerBase.create_node, traceback.set_stack_trace

    def create_marked_node(tracer: TracerBase, *args: Any, **kwargs: Any) -> Node:
        node = create_node(tracer, *args, **kwargs)
        if "in_grad_fn" in traceback.get_current_meta() or "is_gradient_acc" in node.meta:
            node.meta["autograd_backward"] = True
        return node

    def set_or_forget(stack: list[str]) -> None:
        if stack:
            set_stack_trace(stack)
        else:
            traceback.get_current_meta().pop("stack_trace", None)

    with (
        patch.object(TracerBase, "create_node", create_marked_node),
        patch.object(traceback, "set_stack_trace", set_or_forget),
    ):
        yield
