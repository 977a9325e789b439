"""Strides of a tensor that a call passes, made those of the captured one, or refused.

A captured graph computes with the captured strides: a ``view`` in it may be wrong for others, and
``as_strided`` reads other elements. An eager step computes with the strides that it is given. Of
floating-point inputs the two may differ: operators sum in the order of memory, draw random numbers
in that order, and choose other kernels (``linear`` adds its bias apart from a product of strided
rows). Whole numbers and booleans are exact in any order, so a slice of them is copied. It is not
if the graph writes the input, returns a view of it or reads its memory at fixed positions, or if
Python reads its layout while the step is traced, since it may decide by that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gt_trace.capture.input_uses import InputUse

_WHY_NO_COPY: dict[InputUse, str] = {
    "written": "the step writes it",
    "returned": "the step returns a view of it",
    "positions": "the step reads its memory by as_strided",
    "offset": "the step reads its storage offset in Python",
    "strides": "the step reads its strides in Python",
    "contiguity": "the step reads in Python whether it is contiguous",
}


def laid_out(
    tensor: torch.Tensor,
    example: torch.Tensor,
    stride: Sequence[int],
    uses: Sequence[InputUse],
) -> torch.Tensor | str:
    """Return ``tensor`` with the captured strides, or the reason why it cannot have them.

    Strides of dims of size 1, and of empty tensors, place no element: a view gets the captured
    ones. All others need a copy, which slices of whole numbers and booleans may have.

    Args:
        tensor: of the captured shape.
        example: the captured tensor; its strides may be symbolic.
        stride: of the captured tensor, for the shape of ``tensor``.
        uses: of this input by the graph.
    """
    found, wanted = tensor.stride(), tuple(stride)
    bits = (tensor.is_conj(), tensor.is_neg()), (example.is_conj(), example.is_neg())
    same_offset = not reads_offset(uses) or tensor.storage_offset() == example.storage_offset()
    if found == wanted and bits[0] == bits[1] and same_offset:
        return tensor
    if bits[0] != bits[1] and any(bits[1]):
        return "captured as a lazily conjugated or negated view; pass such a view"
    pairs = zip(tensor.shape, found, wanted, strict=True)
    is_same_memory = tensor.numel() == 0 or all(a == b for size, a, b in pairs if size != 1)
    if is_same_memory and bits[0] == bits[1] and same_offset and "strides" not in uses:
        with torch.no_grad():
            return tensor.as_strided(tensor.shape, wanted)
    what = f"strides {list(found)}, captured with {list(wanted)}"
    remedy = "pass .contiguous(), or capture with such an input"
    if wanted != _contiguous(tensor.shape):
        remedy = "pass a tensor with the captured strides, or capture with such an input"
    if bits[0] != bits[1]:
        what, remedy = "a lazily conjugated or negated view", "pass .resolve_conj().resolve_neg()"
    elif not same_offset:
        what = f"storage offset {tensor.storage_offset()}, captured with {example.storage_offset()}"
        remedy = "pass .clone()" if example.storage_offset() == 0 else "capture again with it"
    elif any(size > 1 and step == 0 for size, step in zip(tensor.shape, wanted, strict=True)):
        return f"{what}, where elements share memory; pass an expanded tensor, or capture again"
    no_copy = (
        f"{what}; it cannot be copied, because {_WHY_NO_COPY[uses[0]]}; {remedy}" if uses else ""
    )
    if uses and uses[0] not in ("strides", "contiguity"):
        return no_copy
    if tensor.is_floating_point() or tensor.is_complex():
        return f"{what}; sums over such memory may round otherwise; {remedy}"
    if not _same_order(tensor.shape, found, wanted):
        return f"{what}, with the dims in another order; {remedy}"
    if no_copy:
        return no_copy
    if _overlaps(tensor.shape, wanted):
        return f"{what}, where elements share memory; capture again with such an input"
    with torch.no_grad():
        copy = torch.empty_strided(tensor.shape, wanted, dtype=tensor.dtype, device=tensor.device)
        return copy.copy_(tensor)


def reads_offset(uses: Sequence[InputUse]) -> bool:
    """Return whether a graph depends on where in its memory an input begins."""
    return "positions" in uses or "offset" in uses


def state_problem(
    tensor: torch.Tensor, example: torch.Tensor, uses: Sequence[InputUse]
) -> str | None:
    """Return how a plain tensor of the state differs from the captured one, if it does.

    The state is never copied: steps update it in place, and read it where it lies.
    """
    if tensor.shape != example.shape or tensor.dtype != example.dtype:
        return (
            f"{tensor.dtype} {list(tensor.shape)}, captured as "
            f"{example.dtype} {list(example.shape)}"
        )
    if tensor.layout is not torch.strided:
        return f"{tensor.layout}, captured as torch.strided"
    found, wanted = tensor.stride(), example.stride()
    # Strides of dims of size 1 place nothing, but tell convolutions of the memory format.
    placing = [size != 1 or tensor.dim() > 3 for size in tensor.shape]
    differs = any(
        a != b for is_placing, a, b in zip(placing, found, wanted, strict=True) if is_placing
    )
    if differs and tensor.numel() > 0:
        return (
            f"strides {list(found)}, captured with {list(wanted)}; give it the captured memory "
            "format, or capture again"
        )
    if reads_offset(uses) and tensor.storage_offset() != example.storage_offset():
        why = _WHY_NO_COPY["positions" if "positions" in uses else "offset"]
        return (
            f"storage offset {tensor.storage_offset()}, captured with {example.storage_offset()}, "
            f"and {why}; capture again"
        )
    if (tensor.is_conj(), tensor.is_neg()) != (example.is_conj(), example.is_neg()):
        return (
            "a lazily conjugated or negated view, or captured as one; resolve it, or capture again"
        )
    return None


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if shape else ()


def _same_order(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Check that two strides order the dims alike; an expanded dim may be anywhere."""
    dims = [dim for dim, size in enumerate(shape) if size != 1 and one[dim] and other[dim]]
    return sorted(dims, key=lambda dim: -one[dim]) == sorted(dims, key=lambda dim: -other[dim])


def _overlaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether two elements of a tensor may lie at one place."""
    behind = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size == 1:
            continue
        if step < behind:
            return True
        behind += step * (size - 1)
    return False
