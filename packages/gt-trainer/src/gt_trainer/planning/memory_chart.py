"""The memory of a rank over a step, its kinds one on top of the other."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from gt_trainer.dry_run.numbers_as_text import GIB
from gt_trainer.dry_run.step_over_time import MemoryOverStep
from gt_trainer.plot import Axis, linear_axis, plot

_COLOURS = {
    "parameters and buffers": "#2f6fd0",
    "optimizer state": "#6f9be0",
    "accumulated gradients": "#8c6bb8",
    "gradients": "#9b5fc0",
    "gathered parameters": "#2aa3a3",
    "batch": "#8a8f98",
    "transfers": "#8a8f98",
    "activations": "#3a9d5d",
    "temporaries": "#e08a2b",
    "running action": "#e08a2b",
}
"""Of all kinds, from the bottom to the top."""


def memory_chart(over_step: MemoryOverStep, *, capacity_bytes: int) -> str:
    """Draw it under the limit of the device, with a key."""
    x = linear_axis("ms", over_step.end_us / 1000)
    y = memory_axis(
        "GiB",
        max(each.num_bytes for each in over_step.moments),
        capacity_bytes=capacity_bytes,
    )
    kinds = [kind for kind in _COLOURS if any(each.held.get(kind) for each in over_step.moments)]
    drawn = "".join(_areas(over_step, kinds, x, y))
    if y.has(capacity_bytes / GIB):
        limit = 100 - y.place(capacity_bytes / GIB)
        drawn += f'<line class="limit" x1="0" x2="100" y1="{limit:.2f}" y2="{limit:.2f}"/>'
    key = "".join(
        f'<span><span class="key" style="background: {_COLOURS[kind]}"></span>{kind}</span> '
        for kind in kinds
    )
    return (
        f"<p>{escape(over_step.what)}; {capacity_words(y, capacity_bytes)}.</p>\n"
        f'<p class="keys">{key}</p>\n{plot(x, y, drawn, title="memory over the step")}'
    )


def memory_axis(label: str, most_bytes: int, *, capacity_bytes: int) -> Axis:
    """An axis in GiB, up to the device's capacity where that is not far from what is drawn."""
    is_near = most_bytes >= capacity_bytes / 4
    return linear_axis(label, (max(most_bytes, capacity_bytes) if is_near else most_bytes) / GIB)


def capacity_words(axis: Axis, capacity_bytes: int) -> str:
    """What the limit is that is drawn, or is too far away to be."""
    capacity = f"{capacity_bytes / GIB:.0f} GiB"
    if axis.has(capacity_bytes / GIB):
        return f"dashed: the {capacity} of a GPU"
    return f"a GPU has {capacity}, far above"


def _areas(over_step: MemoryOverStep, kinds: list[str], x: Axis, y: Axis) -> Iterator[str]:
    """Of each kind the area under it and all below it, so that those below are painted on it."""
    end = x.place(over_step.end_us / 1000)
    for number in range(len(kinds), 0, -1):
        below = kinds[:number]
        path, height = "M0 100", -1.0
        for each in over_step.moments:
            total = sum(each.held.get(kind, 0) for kind in below)
            if total == height:
                continue
            height = total
            path += f"H{x.place(each.start_us / 1000):.2f}V{100 - y.place(total / GIB):.2f}"
        kind = kinds[number - 1]
        most = max(each.held.get(kind, 0) for each in over_step.moments)
        yield (
            f'<path fill="{_COLOURS[kind]}" d="{path}H{end:.2f}V100Z">'
            f"<title>{kind}: up to {most / GIB:.2f} GiB</title></path>"
        )
