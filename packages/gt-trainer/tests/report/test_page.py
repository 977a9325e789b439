"""The page of a run, parsed: what it says, that it needs nothing from elsewhere, and fits."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from headless_browser import BROWSER, complaints

from gt_trainer.report.dump_folder import LinkedFile, RunRecord
from gt_trainer.report.page import report_page


class Page(HTMLParser):
    """A page as its tags, its text by tag, and what it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.references: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [value or "" for name, value in attrs if name in ("href", "src")]
        self.open.append(tag)
        self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in {*self.open}:
            self.texts[tag][-1] += data


def run(**changed: object) -> RunRecord:
    steps = [
        {"step": step, "loss": 8 / step, "tokens_per_second": 10.0, "memory_gib": 1.5}
        for step in range(1, 7)
    ]
    start = {"time": 0.0, "num_ranks": 2, "device": "cpu", "model": "llama3 <tiny>"}
    passes = [
        {
            "pass": "bucket-all-gathers",
            "operators": [1200, 1100],
            "collective_bytes": [4096, 4096],
            "done": {"all_gathers_bucketed": 24},
            "refused": ["left mm and 2 more alone: it is <wide>"],
        }
    ]
    capture = {"captured": "Captured the training step", "graphs": [passes], "memory": None}
    values: dict[str, object] = {
        "folder": Path("runs/first"),
        "steps": steps,
        "validations": [],
        "starts": [
            {"step": 1, "last_step": 10, "compile": {}, **start},
            {"step": 4, "last_step": 10, "compile": {"mode": "aot_joint"}, **start},
        ],
        "startup": {"imports": 2.0, "cpu_imports": 1.5, "total": 3.0, "cpu_total": 2.0},
        "captures": [capture],
        "files": [LinkedFile(path="profiling/a trace.json", meaning="profiler trace")],
        **changed,
    }
    return RunRecord(**values)  # type: ignore[arg-type]


def rows(page: Page) -> list[str]:
    return page.texts["tr"]


def test_it_says_how_far_the_run_is_and_with_which_options():
    page = Page(report_page(run()))
    assert page.texts["h1"] == ["Run first"]
    assert "steps6 of 10" in rows(page)
    assert "loss8 at first, 1.3333 at the last" in rows(page)
    assert "modelllama3 <tiny>" in rows(page)
    assert "options--compile.mode aot_joint" in rows(page)


def test_what_the_metrics_have_is_drawn_with_restarts_marked():
    page = Page(report_page(run()))
    assert page.texts["figcaption"] == ["loss", "throughput", "memory"]
    assert page.texts["title"].count("started again before step 4") == 3
    assert "Dashed: started again, before step 4." in page.texts["p"]


def test_validation_is_drawn_where_there_is_some():
    page = Page(report_page(run(validations=[{"step": 5, "validation_loss": 2.0}])))
    assert page.texts["figcaption"][-1] == "validation loss"
    assert "validation loss2 at the last" in rows(page)


def test_passes_are_told_with_what_they_refused_and_why():
    page = Page(report_page(run()))
    assert (
        "bucket-all-gathers1,200 → 1,1004,096 → 4,096"
        "all gathers bucketed 24; left mm and 2 more alone: it is <wide>"
    ) in rows(page)


def test_the_graph_is_shown_by_layer_and_its_passes_by_operator():
    record = {
        "pass": "recompute-tagged",
        "operators": [10, 12],
        "collective_bytes": [0, 0],
        "done": {"recomputed": 2},
        "refused": [],
        "operator_differences": {"aten.mm.default": 2, "aten.t.default": -1},
    }
    capture = {
        "captured": "Captured the training step",
        "graphs": [[record]],
        "layers": [{"layers.0": {"forward": 7, "backward": 5}}],
        "by_layer": [
            {"before": {"layers.0": {"views": 3}}, "after": {"layers.0": {"views": 2}}},
            {"before": None, "after": None},
        ],
        "memory": None,
    }
    page = Page(report_page(run(captures=[capture])))
    assert page.texts["h3"] == [
        "The graph by layer, as it runs",
        "The graph by layer, before and after its passes",
    ]
    assert "layers.03 → 2" in rows(page)
    assert "recompute-tagged+2 aten.mm.default, -1 aten.t.default" in rows(page)
    assert "layers.075" in rows(page)


def test_an_eager_run_has_captured_nothing():
    page = Page(report_page(run(captures=[])))
    assert "Nothing: the run was eager, or kept no record of it." in page.texts["p"]


def test_where_the_start_went_is_a_table():
    assert "imports2.01.5" in rows(Page(report_page(run())))


def test_a_run_that_kept_nothing_but_metrics_has_a_page():
    bare = run(starts=[], startup={}, captures=[], files=[])
    assert Page(report_page(bare)).texts["h2"] == ["Captured"]


def test_it_links_to_files_beside_it_and_loads_nothing():
    text = report_page(run())
    assert Page(text).references == ["profiling/a%20trace.json"]
    assert not re.search(r"https?://|@import|url\(|<script", text)


@pytest.mark.parametrize(
    "rule",
    [
        "color-scheme: light dark",
        "@media (prefers-color-scheme: dark)",
        "minmax(min(100%, 28rem), 1fr)",
        ".wide { overflow-x: auto }",
        'name="viewport"',
    ],
)
def test_it_follows_the_screen(rule: str):
    assert rule in report_page(run())


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_a_browser_complains_about_nothing_and_asks_nobody(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(report_page(run()), encoding="utf-8")
    assert complaints(path) == []
