"""A plan as one HTML page that needs no network: time against memory, where time goes, commands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from gt_trainer.dry_run.numbers_as_text import GIB
from gt_trainer.dry_run.step_over_time import StepTimeline, TimelineRow
from gt_trainer.planning.memory_chart import capacity_words, memory_axis, memory_chart
from gt_trainer.planning.plan_answer import PlanAnswer, binding, ranking_changes, why_slower
from gt_trainer.planning.recipe_outcome import RecipeOutcome
from gt_trainer.planning.scaling_curve import ScalingPoint
from gt_trainer.plot import PLOT_STYLE, Axis, Dot, linear_axis, plot, polyline

_MOST_ROWS = 10

_STYLE = """
:root { color-scheme: light dark; --fits: #2f6fd0; --over: #9aa0a8; --best: #d0592f }
@media (prefers-color-scheme: dark) { :root { --fits: #7fb0ff; --over: #777d86; --best: #ff9a6b } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 1.5rem auto; max-width: 60rem;
  padding: 0 1rem }
.limit { stroke: var(--best); stroke-dasharray: 5 4; stroke-width: 1.5 }
.fits { background: var(--fits) } .over { background: var(--over) }
.best { background: var(--best) } .front { fill: none; stroke: var(--fits); stroke-opacity: .5 }
.growing { background: var(--fits); stroke: var(--fits) } .fixed { background: var(--best);
  stroke: var(--best) } polyline { fill: none; stroke-width: 1.6 }
.bound { stroke-dasharray: 3 4; stroke-opacity: .7 }
.keys span { white-space: nowrap; margin-right: 1em }
.wide { overflow-x: auto } table { border-collapse: collapse }
td, th { padding: .25rem .7rem; text-align: right; white-space: nowrap }
td:last-child, th:last-child { text-align: left }
pre { white-space: pre-wrap; overflow-wrap: anywhere; padding: .7rem; border: 1px solid;
  border-radius: .4rem }
.bar { display: flex; height: 1.1rem; margin: .15rem 0 .6rem; border-radius: .2rem;
  overflow: hidden }
.bar span { display: block } .computing { background: #3a9d5d } .network { background: #9b5fc0 }
.bubble { background: #8a8f98 } .optimizer { background: #e08a2b } .waiting { background: #c9a227 }
.keys .key { display: inline-block; width: .9em; height: .9em; margin-right: .35em }
""".strip()


def plan_page(report: PlanAnswer, *, beside: Sequence[tuple[str, str]] = ()) -> str:
    """An HTML document.

    Args:
        report: of the plan.
        beside: files that lie beside the page: what each is, and its name.
    """
    title = f"{report.model} on {report.num_gpus:,} {report.cluster.hardware.name}"
    body = "\n".join(_body(report, beside))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{escape(title)}</title>\n<style>\n{_STYLE}\n{PLOT_STYLE}\n{TIMELINE_STYLE}\n</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


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
    yield _table(report)
    if len(ranked) > 1:
        yield f"<h2>How sure the order is</h2><p>{escape(_surely(ranked))}</p>"
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
            style=_class(each, best),
            words=f"{each.recipe}: {each.step_us / 1e6:.2f} s, {each.peak_bytes / GIB:.1f} GiB",
        )
        for each in outcomes
    ]
    drawn = polyline(x, y, joined, style="front")
    if x.has(capacity / GIB):
        limit = x.place(capacity / GIB)
        drawn += f'<line class="limit" x1="{limit:.2f}" x2="{limit:.2f}" y1="0" y2="100"/>'
    names = {"best": "fastest", "fits": "fits", "over": "does not fit"}
    key = "".join(
        f'<span><span class="key {kind}"></span>{name}</span> ' for kind, name in names.items()
    )
    return (
        f'<p class="keys">{key}<span>{capacity_words(x, capacity)}</span></p>\n'
        f"{plot(x, y, drawn, title='step time by memory', dots=dots)}"
    )


def pareto_front(outcomes: Sequence[RecipeOutcome]) -> list[RecipeOutcome]:
    """Those for which nothing is both faster and smaller, from the smallest on."""
    front: list[RecipeOutcome] = []
    for each in sorted(outcomes, key=lambda one: (one.peak_bytes, one.step_us)):
        if not front or each.step_us < front[-1].step_us:
            front.append(each)
    return front


def _class(outcome: RecipeOutcome, best: RecipeOutcome) -> str:
    if outcome is best:
        return "best"
    return "fits" if outcome.fits else "over"


def _bars(ranked: Sequence[RecipeOutcome]) -> Iterator[str]:
    kinds = ("computing", "network", "bubble", "optimizer", "waiting")
    key = "".join(f'<span><span class="key {kind}"></span>{kind}</span> ' for kind in kinds)
    yield f'<p class="keys">{key}</p>'
    for each in ranked:
        parts = {
            "computing": each.computing_us / each.step_us,
            "network": each.all_exposed_us / each.step_us,
            "bubble": each.bubble,
            "optimizer": each.optimizer_us / each.step_us,
        }
        parts["waiting"] = max(0.0, 1 - sum(parts.values()))
        longest = each.step_us / ranked[-1].step_us
        spans = "".join(
            f'<span class="{kind}" style="width: {100 * part * longest:.2f}%" '
            f'title="{kind} {part:.1%}"></span>'
            for kind, part in parts.items()
        )
        yield f'<div>{escape(str(each.recipe))}</div><div class="bar">{spans}</div>'


def _table(report: PlanAnswer) -> str:
    head = ("s a step", "tokens/s/GPU", "MFU", "GiB", "exposed", "bubble", "$M/T tokens", "recipe")
    price = report.cluster.price_per_gpu_hour
    rows = [
        (
            f"{each.step_us / 1e6:.2f}",
            f"{each.tokens_per_second_per_gpu:,.0f}",
            f"{each.mfu:.1%}",
            f"{each.peak_bytes / GIB:.1f}",
            f"{each.all_exposed_us / each.step_us:.1%}",
            f"{each.bubble:.1%}",
            f"{each.dollars_per_trillion_tokens(price) / 1e6:.2f}",
            escape(str(each.recipe)),
        )
        for each in report.ranked[:_MOST_ROWS]
    ]
    lines = ["<tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows]
    return '<div class="wide"><table>\n' + "\n".join(lines) + "\n</table></div>"


def _surely(ranked: Sequence[RecipeOutcome]) -> str:
    changes = ranking_changes(ranked)
    if not changes:
        return (
            "The first stays first with compute, memory, network and latency 30 % up and down, "
            f"among the {len(ranked)} simulated that fit."
        )
    return "; ".join(f"{moved}: {winner.recipe} is first" for moved, winner, _ in changes) + "."


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


# What ranks do over a step: a line for each, with bars from left to right.
TIMELINE_STYLE = """
.rank { display: grid; grid-template-columns: 6.5rem 1fr; gap: .5rem; font-size: .8rem;
  line-height: 1.2; align-items: center; margin-bottom: .2rem }
.rank svg { width: 100%; height: 1rem; background: rgb(128 128 128 / .15) }
""".strip()
"""What ``timeline_chart`` needs of a page's style sheet."""

_COLOURS = {
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
"""Of all kinds, in the order of the key."""


def timeline_chart(timeline: StepTimeline) -> str:
    """Draw it, with a key."""
    kinds = {bar.kind for row in timeline.rows for bar in row.bars}
    key = "".join(
        f'<span><span class="key" style="background: {colour}"></span>{kind}</span> '
        for kind, colour in _COLOURS.items()
        if kind in kinds
    )
    rows = "\n".join(_row(row, timeline.end_us) for row in timeline.rows)
    return (
        f"<p>{escape(timeline.what)}; from 0 to {timeline.end_us / 1000:,.0f} ms.</p>\n"
        f'<p class="keys">{key}</p>\n<div role="img" aria-label="what ranks do over the step">\n'
        f"{rows}\n</div>"
    )


def _row(row: TimelineRow, end_us: float) -> str:
    paths = "".join(
        f'<path fill="{colour}" d="{drawn}"/>'
        for kind, colour in _COLOURS.items()
        if (drawn := _timeline_bars(row, kind, end_us))
    )
    return (
        f'<div class="rank"><span>{escape(row.name)}</span><svg viewBox="0 0 100 1" '
        f'preserveAspectRatio="none">{paths}</svg></div>'
    )


def _timeline_bars(row: TimelineRow, kind: str, end_us: float) -> str:
    return "".join(
        f"M{100 * bar.start_us / end_us:.2f} 0H{100 * bar.end_us / end_us:.2f}V1"
        f"H{100 * bar.start_us / end_us:.2f}Z"
        for bar in row.bars
        if bar.kind == kind
    )
