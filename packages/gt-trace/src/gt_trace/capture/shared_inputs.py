"""Inputs of a step that depend on one another, by memory or by autograd's history.

The inputs of a captured graph are independent values. If two lie in one memory and the step writes
one, passes may move a read of the other past the write. If an argument was computed from a
parameter, or is one, its gradient is part of the parameter's, and a graph does not have that part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from gt_trace._torch_internals import storage_key
from gt_trace.capture.flat_inputs import FlatInputs
from gt_trace.capture.graph_inputs import GraphInput
from gt_trace.capture.subclass_layout import flatten_tensor
from gt_trace.errors import CaptureError


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedInput:
    """One plain tensor of the state or of the arguments."""

    name: str
    tensor: torch.Tensor
    is_written: bool


def refuse_dependent_inputs(
    flat: FlatInputs, inputs: Sequence[GraphInput], *, is_differentiable: bool = False
) -> None:
    """Refuse the inputs of a capture that depend on one another.

    Args:
        flat: state and arguments as they are.
        inputs: of the graph, with how it uses them.
        is_differentiable: whether autograd follows calls, and with them the arguments' history.

    Raises:
        CaptureError: lists each.
    """
    written = {(each.name, each.leaf) for each in inputs if "written" in each.uses}
    names = [slot.entry.name for slot in flat.slots]
    arguments = [each for each in flat.arguments if each.layout is not None]
    problems: list[str] = []
    if written:
        wholes = zip([*names, *(each.name for each in arguments)], flat.tensors(), strict=True)
        problems += memory_problems(
            NamedInput(name=name, tensor=plain, is_written=(name, leaf) in written)
            for name, (tensor, _) in wholes
            for leaf, plain in enumerate(flatten_tensor(tensor)[0])
        )
    if not is_differentiable:
        problems += history_problems(
            [(each.name, each.leaf) for each in arguments if each.leaf.requires_grad],
            list(zip(names, (slot.tensor for slot in flat.slots), strict=True)),
        )
    if problems:
        raise CaptureError(
            "the inputs of a captured step must be independent:\n  " + "\n  ".join(problems)
        )


def memory_problems(inputs: Iterable[NamedInput]) -> list[str]:
    """Return a sentence for each pair of inputs in one memory of which the step writes one."""
    by_storage: dict[int, list[NamedInput]] = {}
    for each in inputs:
        if each.tensor.layout is torch.strided:
            by_storage.setdefault(storage_key(each.tensor), []).append(each)
    problems: list[str] = []
    for group in by_storage.values():
        if len(group) == 1 or not any(each.is_written for each in group):
            continue
        for index, one in enumerate(group):
            for other in group[index + 1 :]:
                if (one.is_written or other.is_written) and _overlap(one.tensor, other.tensor):
                    written = one.name if one.is_written else other.name
                    problems.append(
                        f"{one.name} and {other.name} share memory, and the step writes "
                        f"{written}; pass or register a .clone() of one"
                    )
    return problems


def history_problems(
    arguments: Sequence[tuple[str, torch.Tensor]], state: Sequence[tuple[str, torch.Tensor]]
) -> list[str]:
    """Return a sentence for each argument whose gradient would be part of another input's.

    Args:
        arguments: those that require a gradient, by name.
        state: parameters and buffers, by name.
    """
    problems: list[str] = []
    names = {id(tensor): name for name, tensor in state}
    for name, tensor in arguments:
        known = names.setdefault(id(tensor), name)
        if known != name:
            problems.append(
                f"{name} is the same tensor as {known}; pass .detach().requires_grad_()"
            )
    by_node = {id(tensor.grad_fn): name for name, tensor in arguments if tensor.grad_fn is not None}
    for name, tensor in arguments:
        pending = (
            [] if tensor.grad_fn is None else [edge[0] for edge in tensor.grad_fn.next_functions]
        )
        seen: set[int] = set()
        while pending:
            node = pending.pop()
            if node is None or id(node) in seen:
                continue
            seen.add(id(node))
            source = names.get(id(getattr(node, "variable", None))) or by_node.get(id(node))
            if source is not None:
                problems.append(
                    f"{name} was computed from {source}, outside of the step; compute it inside, "
                    "or pass .detach().requires_grad_()"
                )
                break
            pending += [edge[0] for edge in node.next_functions]
    return problems


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether the bytes from the first to the last element of two tensors overlap."""
    (first, behind), (first_other, behind_other) = _bytes(one), _bytes(other)
    return first < behind_other and first_other < behind


def _bytes(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.numel() == 0:
        return 0, 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    first = int(tensor.storage_offset())
    last = first + sum((size - 1) * step for size, step in pairs)
    return first * tensor.itemsize, (last + 1) * tensor.itemsize
