"""The report of a plan as one HTML file that needs no network."""

from __future__ import annotations

import os
from html import escape
from pathlib import Path

from gt_autoparallel.argument_checks import check_arguments, path_problem
from gt_autoparallel.plan.placement_plan import PlacementPlan, plan_problem
from gt_autoparallel.plan.report import PlanReport, ReportTable, plan_report

_STYLE = """
:root { color-scheme: light dark; }
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1100px }
h2 { margin: 2rem 0 .4rem; font-size: 1.1rem }
table { border-collapse: collapse } dl { display: grid; grid-template-columns: max-content auto }
dt { padding-right: 1.5rem; opacity: .75 } dd { margin: 0 }
td, th { padding: .2rem .8rem; text-align: left; border-bottom: 1px solid #8883 }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
td.shard { background: #3b7dd833 } td.partial { background: #e08a2b33 }
p.note { opacity: .75; margin: .4rem 0 }
""".strip()


def report_page(plan: PlacementPlan) -> str:
    """An HTML document with everything that the text report has; sharded axes are tinted."""
    report = plan_report(plan)
    body = "\n".join([_head(report), *(_table(table) for table in report.tables)])
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        f"<title>{escape(report.title)}</title>\n<style>\n{_STYLE}\n</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def write_report_page(plan: PlacementPlan, path: str | os.PathLike[str]) -> Path:
    """Write ``report_page`` to a file; its folder is made if missing.

    Raises:
        PlacementInputError: an argument is not what it must be.
        OSError: the file cannot be written.
    """
    check_arguments("write_report_page", plan_problem(plan), path_problem(path))
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(report_page(plan), encoding="utf-8")
    return target


def _head(report: PlanReport) -> str:
    items = "\n".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in report.summary
    )
    return f"<h1>{escape(report.title)}</h1>\n<dl>\n{items}\n</dl>"


def _table(table: ReportTable) -> str:
    parts = [f"<h2>{escape(table.title)}</h2>"]
    if table.rows:
        lines = [_row(table.header, "th", table.num_text_columns)]
        lines += [_row(row, "td", table.num_text_columns) for row in table.rows]
        parts.append("<table>\n" + "\n".join(lines) + "\n</table>")
    if table.note:
        parts.append(f'<p class="note">{escape(table.note)}</p>')
    return "\n".join(parts)


def _row(cells: tuple[str, ...], tag: str, num_text_columns: int) -> str:
    return (
        "<tr>"
        + "".join(
            f"<{tag}{_class(cell, column >= num_text_columns)}>{escape(cell)}</{tag}>"
            for column, cell in enumerate(cells)
        )
        + "</tr>"
    )


def _class(cell: str, is_number: bool) -> str:
    if is_number:
        return ' class="number"'
    if cell.startswith("S("):
        return ' class="shard"'
    return ' class="partial"' if cell.startswith("P(") else ""
