"""A tensor as a small drawing: its cuts as lines, and what rank 0 holds filled."""

from __future__ import annotations

from html import escape
from math import prod

from torch.distributed.tensor import Partial

from gt_autoparallel.graph.layouts import MeshShape, local_shape, shard_counts, short_text
from gt_autoparallel.plan.plan_picture import DrawnTensor

# As attributes, so that any viewer of SVG has them; ``currentColor`` is light in the dark.
_PAINT = {
    "tensor": 'fill="#888" fill-opacity=".13" stroke="currentColor" stroke-opacity=".5"',
    "held": 'fill="#3b7dd8"',
    "sum": 'fill="#e08a2b"',
    "cut": 'stroke="currentColor" stroke-opacity=".6" stroke-width=".7"',
}
_LONGEST, _SHORTEST = 64.0, 16.0
_SHEET = 4.0
_MAX_SHEETS, _MAX_LINES = 4, 16


def tensor_drawing(tensor: DrawnTensor, mesh: MeshShape) -> str:
    """An SVG of a tensor as the mesh cuts it.

    The first dim goes down and the last one across; what is cut along those between lies behind one
    another. Dims of one element are not drawn, so that a vector always goes down. A tensor that
    every rank holds whole is filled, and one of which ranks hold parts of a sum has another colour.
    Where there are too many cuts to see, some are drawn.
    """
    dims = [dim for dim, size in enumerate(tensor.shape) if size != 1]
    rows, columns = _sides(tuple(tensor.shape[dim] for dim in dims))
    cuts = shard_counts(len(tensor.shape), tensor.layout, mesh)
    counts = [cuts[dim] for dim in dims]
    down = counts[0] if counts else 1
    across = counts[-1] if len(counts) > 1 else 1
    behind = prod(counts[1:-1])
    sheets = min(behind, _MAX_SHEETS)
    width, height = columns + _SHEET * (sheets - 1), rows + _SHEET * (sheets - 1)
    kind = "sum" if any(isinstance(p, Partial) for p in tensor.layout) else "held"
    parts = []
    for sheet in reversed(range(sheets)):
        left, top = _SHEET * sheet, _SHEET * (sheets - 1 - sheet)
        parts.append(_box("tensor", left, top, columns, rows))
        if sheet == 0:
            parts.append(_box(kind, left, top, columns / across, rows / down))
            parts += _lines(left, top, columns, rows, across=across, down=down)
    label = escape(_words(tensor, mesh))
    return (
        f'<svg class="shards" width="{width + 2:.0f}" height="{height + 2:.0f}" '
        f'viewBox="-1 -1 {width + 2:.1f} {height + 2:.1f}" role="img" aria-label="{label}">'
        f"<title>{label}</title>{''.join(parts)}</svg>"
    )


def _sides(shape: tuple[int, ...]) -> tuple[float, float]:
    """Height and width; a vector is a bar that is cut down its length."""
    if not shape:
        return _SHORTEST, _SHORTEST
    if len(shape) == 1:
        return _LONGEST, _SHORTEST / 2
    first, last = max(shape[0], 1), max(shape[-1], 1)
    longest = max(first, last)
    # Square roots: else a matrix of 8 x 4096 would be a line.
    height, width = (max(_SHORTEST, _LONGEST * (side / longest) ** 0.5) for side in (first, last))
    return height, width


def _box(kind: str, left: float, top: float, width: float, height: float) -> str:
    return (
        f'<rect {_PAINT[kind]} x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" '
        f'height="{height:.1f}"/>'
    )


def _lines(
    left: float, top: float, width: float, height: float, *, across: int, down: int
) -> list[str]:
    lines = [
        f'<path {_PAINT["cut"]} d="M{left + width * at:.1f} {top:.1f}v{height:.1f}"/>'
        for at in _cuts(across)
    ]
    return lines + [
        f'<path {_PAINT["cut"]} d="M{left:.1f} {top + height * at:.1f}h{width:.1f}"/>'
        for at in _cuts(down)
    ]


def _cuts(count: int) -> list[float]:
    drawn = min(count, _MAX_LINES)
    return [number / drawn for number in range(1, drawn)]


def _words(tensor: DrawnTensor, mesh: MeshShape) -> str:
    placements = ", ".join(
        f"{short_text((placement,))} along {name} {size}"
        for name, size, placement in zip(mesh.names, mesh.sizes, tensor.layout, strict=True)
    )
    local = list(local_shape(tensor.shape, tensor.layout, mesh))
    return f"{tensor.dtype}{list(tensor.shape)}, {placements}: {local} on each rank"
