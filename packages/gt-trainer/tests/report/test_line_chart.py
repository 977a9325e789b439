"""Lines over steps: axes with round numbers, gaps, marks, and as many points as a page can hold."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

from gt_trainer.report.page import Point, _thinned, line_chart


def drawn(points: list[Point], **options: object) -> ElementTree.Element:
    settings = {"title": "loss", "unit": "nats", "from_zero": False, **options}
    return ElementTree.fromstring(line_chart(points, **settings))  # type: ignore[arg-type]


def lines(chart: ElementTree.Element) -> list[list[Point]]:
    return [
        [tuple(map(float, pair.split(","))) for pair in each.attrib["points"].split()]  # type: ignore[misc]
        for each in chart.iter("polyline")
    ]


def test_a_falling_loss_falls_from_the_left_to_the_right():
    ((first, middle, last),) = lines(drawn([(1, 8.0), (2, 4.0), (3, 2.0)]))
    assert first[0] < middle[0] < last[0]
    assert first[1] < middle[1] < last[1]  # y grows downwards


def test_every_point_is_inside_of_the_picture():
    chart = drawn([(step, 1e6 * (-1) ** step) for step in range(1, 50)])
    for x, y in lines(chart)[0]:
        assert 0 <= x <= 100
        assert 0 <= y <= 100


def test_what_is_no_number_leaves_a_gap():
    points = [(1, 1.0), (2, 2.0), (3, math.nan), (4, math.inf), (5, 1.0)]
    assert [len(each) for each in lines(drawn(points))] == [2, 2]


def test_no_number_at_all_is_said():
    text = line_chart([(1, math.nan)], title="loss", unit="", from_zero=False)
    assert text == "<p>No loss that is a number.</p>"


def test_one_step_alone_is_drawn():
    assert len(lines(drawn([(7, 3.0)]))) == 1


def test_marks_stand_at_their_steps_and_say_what_they_are():
    chart = drawn([(1, 1.0), (3, 1.0), (5, 1.0)], marks=[3, 99])
    (mark,) = (each for each in chart.iter("line") if each.attrib["class"] == "restart")
    assert float(mark.attrib["x1"]) == lines(chart)[0][1][0]
    assert mark.findtext("title") == "started again before step 3"


def test_the_axis_begins_at_zero_where_asked():
    for from_zero, lowest in ((True, "0"), (False, "100")):
        text = line_chart([(1, 100.0), (2, 104.0)], title="", unit="", from_zero=from_zero)
        assert re.findall(r'class="y"[^>]*>([^<]+)<', text)[0] == lowest


def test_a_long_run_keeps_its_extremes_and_gaps_in_order():
    points: list[Point] = [(step, math.sin(step)) for step in range(100_000)]
    points[500] = (500, 99.0)
    points[70_000] = (70_000, math.nan)
    kept = _thinned(points)
    assert len(kept) <= 1001
    assert (500, 99.0) in kept
    assert any(math.isnan(value) for _, value in kept)
    assert [step for step, _ in kept] == sorted(step for step, _ in kept)
