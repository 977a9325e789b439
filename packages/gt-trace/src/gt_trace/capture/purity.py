"""What would make a captured graph impure: refused, with every case listed.

A replay runs operators and nothing else. A buffer that Python replaced, a ``.grad`` that was
written, a tensor that is neither state nor argument: all of these would be lost or frozen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule

from gt_trace.capture.module_state import StateSlot
from gt_trace.errors import CaptureError, ConstantCapturedError


def refuse_side_effects(
    slots: Sequence[StateSlot],
    before: Sequence[tuple[torch.Tensor | None, ...]],
    *,
    writes_grad: bool,
) -> None:
    """Refuse a step that replaced state, or wrote a ``.grad`` without an optimizer to use it.

    Args:
        slots: where the state lives.
        before: ``contents()`` of each slot when the step began.
        writes_grad: whether ``.grad`` is part of the step.

    Raises:
        CaptureError: lists every such tensor.
    """
    problems: list[str] = []
    for slot, held in zip(slots, before, strict=True):
        kind, name = slot.entry.kind, slot.entry.name
        if any(new is not old for new, old in zip(slot.contents(), held, strict=True)):
            problems.append(
                f"{kind} {name} was replaced, and a replay would not replace it; update it in "
                "place (copy_, add_)"
            )
        if not writes_grad and any(old is not None and _has_grad(old) for old in held):
            problems.append(
                f"{name}.grad was written, and a replay would lose it; use torch.autograd.grad "
                "and return the gradients"
            )
    if problems:
        raise CaptureError("the step has side effects:\n  " + "\n  ".join(problems))


def _has_grad(tensor: torch.Tensor) -> bool:
    # Asking anything but a leaf makes torch warn.
    return tensor.is_leaf and tensor.grad is not None


def refuse_constants(graph_module: GraphModule) -> None:
    """Refuse tensors that the graph holds itself.

    A tensor literal is copied fresh at every replay; any other constant is a frozen input.

    Raises:
        ConstantCapturedError: lists every such tensor.
    """
    problems = _constants(graph_module)
    if problems:
        raise ConstantCapturedError(
            "tensors that are neither state nor argument of the step would be frozen into the "
            "graph; register them as buffers, pass them as arguments, or give "
            "constants='allow':\n  " + "\n  ".join(problems)
        )


def _constants(graph_module: GraphModule) -> list[str]:
    """Those of a graph, and of the graphs that its operators take, as FlexAttention's masks."""
    problems: list[str] = []
    for node in graph_module.graph.find_nodes(op="get_attr"):
        value = getattr(graph_module, str(node.target), None)
        if isinstance(value, GraphModule):
            problems += [f"{each}, in {node.target}" for each in _constants(value)]
        if not isinstance(value, torch.Tensor):
            continue
        if all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users):
            continue
        user = next(iter(node.users))
        where = (user.meta.get("stack_trace") or "").strip().splitlines()
        at = f", first read at {where[-1].strip()!r}" if where else ""
        problems.append(f"{value.dtype} {list(value.shape)}{at}")
    return problems
