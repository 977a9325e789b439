"""Frames of drawings: round ticks, places on both kinds of axes, dots at their values."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from gt_config.pages import Axis, Dot, linear_axis, plot, polyline, round_ticks


@pytest.mark.parametrize(
    ("lowest", "highest", "expected"),
    [
        (0.0, 1.0, [0.0, 0.5, 1.0]),
        (2.1, 7.9, [2.0, 4.0, 6.0, 8.0]),
        (3.0, 3.0, [3.0, 4.0]),
        (0.0, 0.0, [0.0, 0.5]),
        (-0.2, 0.3, [-0.2, 0.0, 0.2, 0.4]),
    ],
)
def test_ticks_are_round_and_around_all_values(
    lowest: float, highest: float, expected: list[float]
):
    assert round_ticks(lowest, highest) == pytest.approx(expected)


def test_a_single_tick_is_in_the_middle():
    axis = Axis(label="GPUs", ticks=[(64, "64")], is_logarithmic=True)
    assert axis.place(64) == 50.0


def test_an_axis_ends_with_the_first_round_number_that_is_large_enough():
    axis = linear_axis("GiB", 74.5)
    assert axis.ticks == [(0, "0"), (20, "20"), (40, "40"), (60, "60"), (80, "80")]
    assert [axis.place(value) for value in (0, 40, 80)] == [0, 50, 100]


def test_steps_of_a_logarithmic_axis_are_equally_wide():
    axis = Axis(label="GPUs", ticks=[(64, "64"), (16384, "16,384")], is_logarithmic=True)
    assert [axis.place(value) for value in (64, 256, 1024, 16384)] == pytest.approx(
        [0, 25, 50, 100]
    )


def test_dots_and_lines_stand_at_their_values_and_words_are_escaped():
    x, y = linear_axis("x & y", 4.0), linear_axis("up", 2.0)
    line = polyline(x, y, [(0, 0), (4, 2)], style="front")
    dot = Dot(x=1.0, y=2.0, kind="best", words="a < b")
    chart = ElementTree.fromstring(plot(x, y, line, title="of a test", dots=[dot]))
    (drawn,) = chart.iter("polyline")
    assert drawn.attrib["points"] == "0.00,100.00 100.00,0.00"
    (found,) = chart.iter("i")
    assert found.attrib["style"] == "left: 25.00%; bottom: 100.00%"
    assert found.attrib["title"] == "a < b"
    assert [each.text for each in chart.iter("p")] == ["up", "x & y"]
    assert len([each for each in chart.iter("span") if each.attrib["class"] == "y"]) == len(y.ticks)
