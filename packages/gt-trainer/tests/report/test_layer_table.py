"""A row for each layer, one for equal neighbours, with bars to one scale."""

from __future__ import annotations

import re

from gt_trainer.report.page import before_and_after_table, layer_table

LAYER = {"forward": 30, "backward": 60, "collectives": 10}
COUNTS = {
    "embed": {"forward": 1},
    "layers.0": {**LAYER, "forward": 25},
    **{f"layers.{number}": LAYER for number in range(1, 4)},
    "(loss)": {"loss": 50},
}


def rows(table: str) -> list[str]:
    return [re.sub(r"<[^>]*>", " ", row).strip() for row in re.findall(r"<tr>(.*?)</tr>", table)]


def test_equal_neighbours_have_one_row():
    assert [" ".join(row.split()) for row in rows(layer_table(COUNTS))] == [
        "layer operators forward loss backward collectives",
        "embed 1 0 0 0",
        "layers.0 25 0 60 10",
        "layers.1 to layers.3, each 30 0 60 10",
        "(loss) 0 50 0 0",
    ]


def test_modules_without_a_number_keep_a_row_each():
    assert len(rows(layer_table({"norm": {"forward": 1}, "output": {"forward": 1}}))) == 3


def test_bars_have_one_scale():
    bars = re.findall(r'<div class="bar">.*?</div>', layer_table(COUNTS))
    widths = [sum(map(float, re.findall(r"width:([\d.]+)%", bar))) for bar in bars]
    assert widths == [1, 95, 100, 50]


def test_a_graph_without_operators_has_a_header_alone():
    assert len(rows(layer_table({}))) == 1


def test_what_passes_changed_is_told_of_layers_that_were_and_are_equal():
    layer = {"views": 9, "collective bytes": 2**20, "collectives": 2}
    before = {"embed": {"views": 1}, **{f"layers.{number}": layer for number in range(3)}}
    after = {**before, "layers.2": {**layer, "collectives": 1, "waits": 4000}, "(loss)": {}}
    table = before_and_after_table(before, after)
    assert [" | ".join(re.split(r" {2,}", row)) for row in rows(table)] == [
        "layer | views | collectives | waits | collective MiB",
        "embed | 1 | 0 | 0 | 0.00",
        "layers.0 to layers.1, each | 9 | 2 | 0 | 1.00",
        "layers.2 | 9 | 2 → 1 | 0 → 4,000 | 1.00",
        "(loss) | 0 | 0 | 0 | 0.00",
    ]
