"""The page of a plan draws it, has every number of the report, and needs nothing else."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from plan_doubles import DDP, FSDP, TENSOR_PARALLEL, P, plan_by_hand

from gt_autoparallel.plan.numbers_as_text import size_text
from gt_autoparallel.plan.placement_plan import PlacementPlan
from gt_autoparallel.plan.report import plan_report
from gt_autoparallel.plan.report_page import COLOURS, report_page, write_report_page
from gt_autoparallel.problem.constraints import ResolvedRequest


@pytest.fixture(scope="module")
def plan() -> PlacementPlan:
    request = ResolvedRequest(memory_budget_bytes=2**20)
    return plan_by_hand(("dp", 2, FSDP), ("tp", 2, TENSOR_PARALLEL), request=request)


class Cells(HTMLParser):
    """The text of a page's cells, and whatever it would load."""

    def __init__(self) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.open: list[str] = []
        self.opened: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)
            self.opened.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells.append(data)


def test_the_page_has_every_cell_of_the_report_and_loads_nothing(plan):
    page = report_page(plan)
    parser = Cells()
    parser.feed(page)
    assert parser.open == []
    assert parser.links == []
    assert "script" not in parser.opened
    assert re.search(r"https?:|@import|url\(", page) is None
    expected = [
        cell
        for table in plan_report(plan).tables
        for row in ((table.header, *table.rows) if table.rows else ())
        for cell in row
    ]
    assert parser.cells == expected


def test_the_page_escapes_names_and_is_the_same_every_time(plan, tmp_path: Path):
    nodes = tuple(
        replace(node, target="<b>&") if node.kind == "input" else node for node in plan.graph.nodes
    )
    odd = replace(plan, graph=replace(plan.graph, nodes=nodes))
    path = write_report_page(odd, tmp_path / "new" / "plan.html")
    assert "&lt;b&gt;&amp;" in path.read_text()
    assert "<b>&" not in path.read_text()
    assert path.read_text() == report_page(odd)


def test_placements_are_tinted(plan):
    assert '<td class="shard">S(0)</td>' in report_page(plan)
    assert P not in {p for option in plan.options for layout in option.operands for p in layout}


def headings(page: str) -> list[str]:
    """Names of the drawn layers, as text."""
    return [re.sub("<.*?>", "", text) for text in re.findall("<h3>(.*?)</h3>", page)]


def test_equal_layers_are_drawn_once_with_their_number(plan):
    alike = report_page(plan_by_hand(("dp", 4, DDP)))
    assert headings(alike) == ["layers.0-1 x 2"]
    assert headings(report_page(plan)) == ["layers.0", "layers.1", "the model"]


def test_what_moves_is_an_arrow_with_bytes_and_time(plan):
    words = [
        re.sub("<br/>", ", ", text)
        for text in re.findall(r"<span>((?:(?!<span).)*us.*?)</span>", report_page(plan))
    ]
    assert words == [
        "unshard: all-gather dp 512 B, 0.5 us behind compute",
        "reduce gradient: reduce-scatter dp 512 B, 0.5 us behind compute",
        "unshard: all-gather dp 512 B, 0.5 us behind compute",
        "reduce gradient: reduce-scatter dp 512 B, 0.5 us behind compute",
        "all-reduce tp 256 B, 0.5 us",
    ]
    # As many arrows; before and after each of them a tensor, of the stored weights once.
    page = report_page(plan)
    assert page.count('<svg class="arrow"') == 5
    assert page.count('<svg class="shards"') == 2 * (1 + 1 + 2) + 2


def test_memory_is_a_bar_as_long_as_the_budget(plan):
    page = report_page(plan)
    widths = dict(re.findall(r'<i class="(\w+)" style="width:([\d.]+)%" title', page))
    kinds = {"parameters", "gradients", "optimizer_state", "saved_activations", "in_flight"}
    assert set(widths) == kinds
    assert float(widths["parameters"]) == pytest.approx(100 * 512 / 2**20, abs=0.01)
    assert "the bar is the budget, 1.00 MiB" in page
    unlimited = replace(plan, request=ResolvedRequest())
    widths = dict(
        re.findall(r'<i class="(\w+)" style="width:([\d.]+)%" title', report_page(unlimited))
    )
    assert sum(map(float, widths.values())) == pytest.approx(100, abs=0.1)


def test_memory_over_the_step_says_what_its_largest_column_leaves_out(plan):
    drawn = sum(plan.memory.in_backward.values())
    assert plan.memory.total > drawn
    note = f"; at most {size_text(drawn)}"
    assert f"{note}, without what is in flight</p>" in report_page(plan)
    nothing = replace(plan, memory=replace(plan.memory, in_flight=0))
    assert f"{note}</p>" in report_page(nothing)


def test_reasons_open_on_click_and_only_where_there_are_some(plan):
    assert 'class="why"' not in report_page(plan)
    page = report_page(plan, reasons={"layers.1.weight": "S(0) costs <b>", "x": "not shown"})
    # The drawing of the tensor is what is clicked on.
    assert page.count("</svg> why</summary><pre>S(0) costs &lt;b&gt;</pre></details>") == 1
    assert page.count('<details class="why"><summary><svg class="shards"') == 1
    assert "not shown" not in page


def test_the_page_is_for_phones_and_for_the_dark_too(plan):
    page = report_page(plan)
    assert '<meta name="viewport" content="width=device-width, initial-scale=1"/>' in page
    assert "color-scheme: light dark" in page
    assert "@media (max-width: 700px)" in page


def test_a_colour_means_one_thing() -> None:
    colours = {**COLOURS}
    assert colours.pop("parameters") == colours["held"]  # what rank 0 holds
    assert len({*colours.values()}) == len(colours)
