"""The scaling curve, drawn."""

from __future__ import annotations

from collections.abc import Sequence

from gt_trainer.planning.scaling_curve import ScalingPoint
from gt_trainer.plot import Axis, Dot, linear_axis, plot, polyline

_STYLES = {True: "growing", False: "fixed"}


def scaling_chart(points: Sequence[ScalingPoint]) -> str:
    """Tokens of each GPU over the number of GPUs: simulated, and the bounds dashed."""
    bounded = [each for each in points if each.most_tokens_per_second_per_gpu is not None]
    if not bounded:
        return "<p>No size has a recipe that could fit.</p>"
    sizes = sorted({each.num_gpus for each in points})
    x = Axis(label="GPUs", ticks=[(size, f"{size:,}") for size in sizes], is_logarithmic=True)
    y = linear_axis("tokens a second of each GPU", max(_most(each) for each in bounded))
    drawn, dots = "", []
    for grows, style in _STYLES.items():
        mine = [each for each in bounded if each.grows is grows]
        limits = [(each.num_gpus, _most(each)) for each in mine]
        found = [(each, each.simulated) for each in mine if each.simulated is not None]
        line = [(each.num_gpus, one.tokens_per_second_per_gpu) for each, one in found]
        drawn += polyline(x, y, limits, style=f"{style} bound") + polyline(x, y, line, style=style)
        dots += [
            Dot(
                x=each.num_gpus,
                y=one.tokens_per_second_per_gpu,
                style=style,
                words=f"{one.tokens_per_second_per_gpu:,.0f} tokens/s/GPU, {one.mfu:.1%} MFU: "
                f"{one.recipe}",
            )
            for each, one in found
        ]
    missing = [
        f"{each.num_gpus:,} ({_STYLES[each.grows]})" for each in bounded if each.simulated is None
    ]
    note = (
        f" Nothing that fits was simulated in the time for: {', '.join(missing)}."
        if missing
        else ""
    )
    return (
        "<p>Of each size the recipe that is guessed to be the fastest was simulated: that is no "
        "search, and a better one may exist. Dashed: a bound, which no recipe can exceed in the "
        f"simulator.{note}</p>\n"
        '<p class="keys"><span><span class="key growing"></span>batch grows with the GPUs</span>'
        '<span><span class="key fixed"></span>batch of the plan</span></p>\n'
        f"{plot(x, y, drawn, title='tokens a second of each GPU by number of GPUs', dots=dots)}"
    )


def _most(point: ScalingPoint) -> float:
    return point.most_tokens_per_second_per_gpu or 0.0
