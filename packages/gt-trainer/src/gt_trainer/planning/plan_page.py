"""A plan as one HTML page that needs no network: time against memory, where time goes, commands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from gt_config.pages import (
    Axis,
    Dot,
    TimelineBar,
    bar,
    html_page,
    key,
    linear_axis,
    marker,
    plot,
    polyline,
    style_name,
    table,
    timeline,
)
from gt_trainer.dry_run.numbers_as_text import GIB
from gt_trainer.dry_run.step_over_time import Bar, MemoryOverStep, StepTimeline
from gt_trainer.planning.plan_answer import (
    RANKED_HEAD,
    PlanAnswer,
    binding,
    ranked_rows,
    sensitivity,
    why_slower,
)
from gt_trainer.planning.recipe_outcome import RecipeOutcome
from gt_trainer.planning.scaling_curve import ScalingPoint

_MOST_ROWS = 10

_STYLE = """
:root { --fits: #2f6fd0; --over: #9aa0a8; --best: #d0592f }
@media (prefers-color-scheme: dark) { :root { --fits: #7fb0ff; --over: #777d86; --best: #ff9a6b } }
body { max-width: 60rem } td, th { white-space: nowrap }
pre { padding: .7rem; border: 1px solid; border-radius: .4rem } .bar { margin-bottom: .6rem }
.limit { stroke: var(--best); stroke-dasharray: 5 4; stroke-width: 1.5 }
.front, .growing { stroke: var(--fits) } .fixed { stroke: var(--best) }
polyline { fill: none; stroke-width: 1.6 } .front { stroke-opacity: .5 }
.bound { stroke-dasharray: 3 4; stroke-opacity: .7 }
""".strip()

_FRONT = {"best": "fastest", "fits": "fits", "over": "does not fit"}
_SPENT = {
    "computing": "#3a9d5d",
    "network": "#9b5fc0",
    "bubble": "#8a8f98",
    "optimizer": "#c0604f",
    "waiting": "#c9a227",
}
_DONE = {
    "forward": "#3b7dd8",
    "loss": "#c9a227",
    "backward": "#3a9d5d",
    "gradients of inputs": "#2aa3a3",
    "gradients of weights": "#e08a2b",
    "forward and backward": "#7d9bb0",
    "other computation": "#8a8f98",
    "communication": "#9b5fc0",
    "optimizer": "#c0604f",
}
"""Colours of a timeline, in the order of its key."""

_HELD = {
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
"""Colours of memory, from the bottom to the top. Kinds that are missing here are drawn in black."""

_VARYING = {**{kind: f"var(--{kind})" for kind in _FRONT}, "growing": "var(--fits)"}
_COLOURS = {**_VARYING, "fixed": "var(--best)", **_SPENT, **_DONE, **_HELD}


def plan_page(report: PlanAnswer, *, beside: Sequence[tuple[str, str]] = ()) -> str:
    """Return an HTML document.

    Args:
        report: the plan.
        beside: files next to the page: what each is, and its name.
    """
    title = f"{report.model} on {report.num_gpus:,} {report.cluster.hardware.name}"
    body = [f"<h1>{escape(title)}</h1>", *_body(report, beside)]
    return html_page(title, body, style=_STYLE, colours=_COLOURS)


def _body(report: PlanAnswer, beside: Sequence[tuple[str, str]]) -> Iterator[str]:
    plan, ranked = report.plan, report.ranked
    yield (
        f"<p>{report.global_batch_tokens:,} tokens a step. Simulated by a model of the hardware: "
        f"nothing here was measured. Of {plan.num_candidates:,} candidates {plan.num_cut:,} were "
        f"bounded away, {len(plan.outcomes):,} simulated, and {plan.num_left:,} are left that "
        "could be faster.</p>"
    )
    if not plan.has_all_candidates:
        yield "<p>It was stopped before all candidates were known: others may be faster.</p>"
    if not ranked:
        yield "<p><strong>Nothing that was simulated fits.</strong></p>"
        yield from _run_beside(report)
        yield from _scaling(report)
        return
    best = ranked[0]
    yield (
        f"<p><strong>Fastest:</strong> {escape(str(best.recipe))}: {best.step_us / 1e6:.2f} s a "
        f"step, {best.tokens_per_second_per_gpu:,.0f} tokens/s/GPU, {best.mfu:.1%} MFU, "
        f"{best.peak_bytes / GIB:.1f} of {best.capacity_bytes / GIB:.1f} GiB.<br/>"
        f"<strong>What limits it:</strong> {escape(binding(best))}.</p>"
    )
    yield from _run_beside(report)
    if len(ranked) > 1:
        yield f"<p><strong>Second:</strong> {escape(why_slower(best, ranked[1]))}.</p>"
    yield "<h2>Time against memory</h2>"
    yield _front([each[0] for each in plan.outcomes], best)
    yield "<h2>Where the time goes</h2>"
    yield from _bars(ranked[:_MOST_ROWS])
    yield f"<h2>What ranks do in the fastest</h2>{timeline_chart(best.timeline)}"
    yield "<h2>Memory of the fastest over its step</h2>"
    yield memory_chart(best.memory_over_step, capacity_bytes=best.capacity_bytes)
    yield "<h2>Recipes that fit</h2>"
    rows = ranked_rows(ranked[:_MOST_ROWS], report.cluster)
    yield table(rows, RANKED_HEAD, numbers=range(len(RANKED_HEAD) - 1))
    if len(ranked) > 1:
        yield f"<h2>How sure the order is</h2><p>{escape('; '.join(sensitivity(ranked)))}.</p>"
    yield from _scaling(report)
    yield f"<h2>To run the fastest</h2><pre>{escape(report.command(best))}</pre>"
    if beside:
        links = ", ".join(f'<a href="{escape(name)}">{escape(what)}</a>' for what, name in beside)
        yield f"<p>Beside this page: {links}.</p>"


def _scaling(report: PlanAnswer) -> Iterator[str]:
    if report.scaling:
        yield f"<h2>Other numbers of GPUs</h2>{scaling_chart(report.scaling)}"


def _run_beside(report: PlanAnswer) -> Iterator[str]:
    words = report.beside_in_words
    if words is not None:
        yield f"<p><strong>Beside it:</strong> {escape(words)}.</p>"


def _front(outcomes: Sequence[RecipeOutcome], best: RecipeOutcome) -> str:
    """A point for each recipe; those that nothing beats in both are joined."""
    capacity = best.capacity_bytes
    most = max(each.peak_bytes for each in outcomes)
    x = memory_axis("GiB of the fullest rank", most, capacity_bytes=capacity)
    y = linear_axis("seconds a step", max(each.step_us for each in outcomes) / 1e6)
    joined = [(each.peak_bytes / GIB, each.step_us / 1e6) for each in pareto_front(outcomes)]
    dots = [
        Dot(
            x=each.peak_bytes / GIB,
            y=each.step_us / 1e6,
            kind=_front_kind(each, best),
            words=f"{each.recipe}: {each.step_us / 1e6:.2f} s, {each.peak_bytes / GIB:.1f} GiB",
        )
        for each in outcomes
    ]
    drawn = polyline(x, y, joined, style="front")
    if x.has(capacity / GIB):
        drawn += marker(x=x.place(capacity / GIB), style="limit")
    frame = plot(x, y, drawn, title="step time by memory", dots=dots)
    return f"{key(_FRONT, capacity_words(x, capacity))}\n{frame}"


def pareto_front(outcomes: Sequence[RecipeOutcome]) -> list[RecipeOutcome]:
    """Return the outcomes that no other one beats in time and memory, the smallest first."""
    front: list[RecipeOutcome] = []
    for each in sorted(outcomes, key=lambda one: (one.peak_bytes, one.step_us)):
        if not front or each.step_us < front[-1].step_us:
            front.append(each)
    return front


def _front_kind(outcome: RecipeOutcome, best: RecipeOutcome) -> str:
    if outcome is best:
        return "best"
    return "fits" if outcome.fits else "over"


def _bars(ranked: Sequence[RecipeOutcome]) -> Iterator[str]:
    yield key(_SPENT)
    for each in ranked:
        parts = {
            "computing": each.computing_us,
            "network": each.all_exposed_us,
            "bubble": each.bubble * each.step_us,
            "optimizer": each.optimizer_us,
        }
        parts["waiting"] = max(0.0, each.step_us - sum(parts.values()))
        words = {kind: f"{kind} {us / each.step_us:.1%}" for kind, us in parts.items()}
        drawn = bar(parts, longest=ranked[-1].step_us, words=words)
        yield f"<div>{escape(str(each.recipe))}</div>{drawn}"


# The scaling curve, drawn.
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
                kind=style,
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
        f"{key({'growing': 'batch grows with the GPUs', 'fixed': 'batch of the plan'})}\n"
        f"{plot(x, y, drawn, title='tokens a second of each GPU by number of GPUs', dots=dots)}"
    )


def _most(point: ScalingPoint) -> float:
    return point.most_tokens_per_second_per_gpu or 0.0


def timeline_chart(drawn: StepTimeline) -> str:
    """Return what ranks do over a step, with a key."""
    kinds = {each.kind for row in drawn.rows for each in row.bars}
    lanes = ((row.name, [_timeline_bar(each) for each in row.bars]) for row in drawn.rows)
    return (
        f"<p>{escape(drawn.what)}; from 0 to {drawn.end_us / 1000:,.0f} ms.</p>\n"
        f"{key(kind for kind in _DONE if kind in kinds)}\n"
        f"{timeline(lanes, drawn.end_us, title='what ranks do over the step')}"
    )


def _timeline_bar(each: Bar) -> TimelineBar:
    return TimelineBar(start=each.start_us, end=each.end_us, kind=each.kind)


def memory_chart(over_step: MemoryOverStep, *, capacity_bytes: int) -> str:
    """Return the memory of a rank over a step under the limit of the device, with a key."""
    x = linear_axis("ms", over_step.end_us / 1000)
    most = max(each.num_bytes for each in over_step.moments)
    y = memory_axis("GiB", most, capacity_bytes=capacity_bytes)
    held = dict.fromkeys((*_HELD, *(kind for each in over_step.moments for kind in each.held)))
    kinds = [kind for kind in held if any(each.held.get(kind) for each in over_step.moments)]
    drawn = "".join(_areas(over_step, kinds, x, y))
    if y.has(capacity_bytes / GIB):
        drawn += marker(y=y.place(capacity_bytes / GIB), style="limit")
    return (
        f"<p>{escape(over_step.what)}; {capacity_words(y, capacity_bytes)}.</p>\n"
        f"{key(kinds)}\n{plot(x, y, drawn, title='memory over the step')}"
    )


def memory_axis(label: str, most_bytes: int, *, capacity_bytes: int) -> Axis:
    """Return an axis in GiB. It includes the device's capacity unless that is far above."""
    is_near = most_bytes >= capacity_bytes / 4
    return linear_axis(label, (max(most_bytes, capacity_bytes) if is_near else most_bytes) / GIB)


def capacity_words(axis: Axis, capacity_bytes: int) -> str:
    """Return what the drawn limit is, or that it is too far away to be drawn."""
    capacity = f"{capacity_bytes / GIB:.0f} GiB"
    if axis.has(capacity_bytes / GIB):
        return f"dashed: the {capacity} of a GPU"
    return f"a GPU has {capacity}, far above"


def _areas(over_step: MemoryOverStep, kinds: list[str], x: Axis, y: Axis) -> Iterator[str]:
    """Yield the area of each kind with all kinds below it, which later areas are painted on."""
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
            f'<path class="{style_name(kind)}" d="{path}H{end:.2f}V100Z">'
            f"<title>{kind}: up to {most / GIB:.2f} GiB</title></path>"
        )
