"""The drawing of a simulated layer, before and after scheduling."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from expecttest import assert_expected_inline

from gt_config.node_keys import ModuleAnnotation
from gt_passes import ScheduleEpOverlap
from gt_passes.simulation import CostModel, simulate_step
from gt_trace.annotate import annotate

REPOSITORY = Path(__file__).resolve().parent.parent

with pytest.MonkeyPatch.context() as paths:
    paths.syspath_prepend(REPOSITORY / "packages/gt-passes/tests")
    paths.syspath_prepend(REPOSITORY / "benchmarks")
    from chunk_overlap.overlap_page import overlap_page, write_overlap_page
    from chunk_overlap.overlap_picture import layer_timeline
    from ep_overlap.chunked_graphs import ROOT, exchanged, forward_region
    from pass_graphs import capture, run_pass

X = torch.ones(2 * 16384, 2048, dtype=torch.bfloat16, device="meta")
W = torch.ones(2048, 5120, dtype=torch.bfloat16, device="meta")


def region(x, w):
    def of_chunk(part):
        there = exchanged(part @ w @ w.t(), num_ranks=16)
        return exchanged(there @ w @ w.t(), num_ranks=16) @ w @ w.t()

    with annotate(ModuleAnnotation(fqn=ROOT)):
        return forward_region(x, 2, of_chunk=of_chunk)


@pytest.fixture(scope="module")
def timelines():
    graph_module = capture(region, X, W)
    cost_model = CostModel(ranks_of_group=lambda name: range(16))
    before = layer_timeline(simulate_step(graph_module, cost_model), ROOT, "forward")
    run_pass(ScheduleEpOverlap(), graph_module)
    after = layer_timeline(simulate_step(graph_module, cost_model), ROOT, "forward")
    return {"before": before, "after": after}


def test_text_shows_each_chunk_and_what_stands_still(timelines):
    assert_expected_inline(
        timelines["before"].text(columns=80),
        """\
layers.1.moe forward, simulated on H100 SXM: 8.85 ms; token exchange 3.00 ms, of it hidden 0.00 ms and exposed 3.00 ms
  compute             000000000      000000000       00000000011111111       111111111       11111111#
  token exchange               000000         0000000                 1111111         1111111
  exposed                      !!!!!!         !!!!!!!                 !!!!!!!         !!!!!!!
""",
    )
    assert_expected_inline(
        timelines["after"].text(columns=80),
        """\
layers.1.moe forward, simulated on H100 SXM: 6.21 ms; token exchange 3.00 ms, of it hidden 3.00 ms and exposed 0.00 ms
  compute             0000000000001111111111111100000000000001111111111111100000000000001111111111111#
  token exchange                  0000000000    1111111111   0000000000    1111111111
""",
    )


def test_times_add_up(timelines):
    before, after = timelines["before"], timelines["after"]
    assert before.exchange_us == pytest.approx(after.exchange_us)
    assert after.exposed_us < before.exposed_us
    for each in timelines.values():
        assert each.hidden_us + each.exposed_us == pytest.approx(each.exchange_us)
        drawn = [bar for bar in each.bars if bar.lane == "exposed"]
        assert sum(bar.end_us - bar.start_us for bar in drawn) == pytest.approx(each.exposed_us)


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        loads = tag in {"script", "link", "img", "iframe"}
        self.found += [tag for name, _ in attrs if loads or name in {"src", "href"}]


def test_the_page_is_well_formed_and_loads_nothing(timelines, tmp_path):
    write_overlap_page(timelines, tmp_path / "deep" / "page.html")
    page = (tmp_path / "deep" / "page.html").read_text(encoding="utf-8")
    assert page == overlap_page(timelines)
    links = _Links()
    links.feed(page)
    assert links.found == []
    assert "url(" not in page
    assert "://" not in page
    root = ElementTree.fromstring(page.removeprefix("<!doctype html>\n"))
    assert len(root.findall(".//svg")) == 2
    assert len(root.findall(".//rect")) == sum(len(each.bars) for each in timelines.values())
    assert "simulated on" in page


def test_a_module_that_does_not_run_is_an_error():
    simulation = simulate_step(capture(torch.cos, torch.ones(2)), CostModel())
    with pytest.raises(ValueError, match=r"no node of the phase backward belongs to 'layers\.9'"):
        layer_timeline(simulation, "layers.9", "backward")
