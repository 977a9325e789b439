"""The page: complete, without a network, and with the answers in it."""

import dataclasses
from html.parser import HTMLParser

import pytest
from headless_browser import BROWSER, complaints
from planning.outcomes import outcome, report, scaling

from gt_trainer.planning.plan_page import pareto_front, plan_page
from gt_trainer.planning.run_beside import SimulatedBeside

_VOID = {"meta", "br", "line", "polyline", "path"}


class _Balanced(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.problems, self.tags = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag in _VOID:
            return
        if not self.open or self.open.pop() != tag:
            self.problems.append(tag)


def _page():
    outcomes = [(outcome(8),), (outcome(4, ms=1250.0, gib=30),), (outcome(2, ms=800.0, gib=90),)]
    return plan_page(report(*outcomes, scaling=scaling()), beside=[("a trace", "plan.trace.json")])


def test_the_page_is_well_formed_and_asks_for_nothing():
    page = _page()
    parsed = _Balanced()
    parsed.feed(page)
    assert parsed.problems == []
    assert parsed.open == []
    assert "http" not in page
    asked = [attrs for _, attrs in parsed.tags if "src" in attrs or attrs.get("rel")]
    assert asked == []
    assert not any(tag in ("script", "link", "iframe") for tag, _ in parsed.tags)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_a_browser_complains_about_nothing_and_asks_nobody(tmp_path):
    path = tmp_path / "plan.html"
    path.write_text(_page())
    assert complaints(path) == []


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_errors_of_scripts_and_requests_are_found(tmp_path):
    path = tmp_path / "bad.html"
    path.write_text("<html><img src='http://example.org/a.png'><script>nothing()</script></html>")
    error, request = complaints(path)
    assert "nothing is not defined" in error
    assert request == "http://example.org/a.png"


def test_the_page_fits_a_phone_and_a_dark_room():
    page = _page()
    assert '<meta name="viewport" content="width=device-width, initial-scale=1"/>' in page
    assert "prefers-color-scheme: dark" in page


def test_the_page_says_what_fits_what_is_fastest_and_what_limits_it():
    page = _page()
    assert "<strong>Fastest:</strong> dp_shard 8 | 1 x 1 seq selective: 1.00 s a step" in page
    assert "<strong>What limits it:</strong> 80% of the step computes" in page
    assert [page.count(f'class="dot {kind}"') for kind in ("fits", "best", "over")] == [1, 1, 1]
    assert 'href="plan.trace.json"' in page


@pytest.mark.parametrize("fitting", [(), ((outcome(8),),)], ids=["nothing_fits", "one_fits"])
def test_the_page_says_how_a_run_beside_compares(fitting):
    large = outcome(2, gib=90)
    found = report(*fitting, (large,))
    beside = SimulatedBeside(flags=(), result=large)
    page = plan_page(dataclasses.replace(found, beside=beside))
    assert f"<strong>Beside it:</strong> {large.recipe} does not fit" in page
    assert "Beside it" not in plan_page(found)


def test_the_page_draws_ranks_and_memory_over_the_step_and_other_numbers_of_gpus():
    page = _page()
    assert 'aria-label="what ranks do over the step"' in page
    assert 'aria-label="memory over the step"' in page
    assert 'aria-label="tokens a second of each GPU by number of GPUs"' in page


def test_a_limit_far_above_what_is_drawn_is_told_in_words():
    page = plan_page(report((outcome(8, gib=1),)))
    assert "a GPU has 74 GiB, far above" in page
    assert 'class="limit"' not in page


def test_a_plan_without_a_recipe_that_fits_has_a_page_too():
    assert "Nothing that was simulated fits." in plan_page(report((outcome(8, gib=90),)))


def test_the_page_says_that_not_all_candidates_were_known():
    said = "It was stopped before all candidates were known: others may be faster."
    assert said in plan_page(report((outcome(8, gib=90),), has_all_candidates=False))
    assert said not in plan_page(report((outcome(8, gib=90),)))


def test_the_front_has_what_nothing_beats_in_both():
    small, fast = outcome(8, gib=30, ms=1200.0), outcome(4, gib=60, ms=900.0)
    worse = outcome(2, gib=61, ms=950.0)
    assert pareto_front([worse, fast, small]) == [small, fast]
