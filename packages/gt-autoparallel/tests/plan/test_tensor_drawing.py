"""A tensor's drawing has its cuts, and what one rank holds filled."""

from __future__ import annotations

import re

import pytest
from plan_doubles import S0, S1, P, R
from torch.distributed.tensor import Shard

from gt_autoparallel.graph.layouts import Layout, MeshShape
from gt_autoparallel.plan.plan_picture import DrawnTensor
from gt_autoparallel.plan.report_page import tensor_drawing

MESH = MeshShape(names=("dp", "tp"), sizes=(4, 2))
HELD, SUM = "#3b7dd8", "#e08a2b"


def drawing(shape: tuple[int, ...], layout: Layout, mesh: MeshShape = MESH) -> str:
    return tensor_drawing(
        DrawnTensor(shape=shape, dtype="float32", layout=layout, local_bytes=4), mesh
    )


def filled(svg: str, colour: str) -> tuple[float, float]:
    """Width and height of what is filled with a colour."""
    ((width, height),) = re.findall(
        rf'<rect fill="{colour}" x="[\d.]+" y="[\d.]+" width="([\d.]+)" height="([\d.]+)"', svg
    )
    return float(width), float(height)


@pytest.mark.parametrize(
    ("shape", "layout", "size", "num_cuts"),
    [
        ((16, 16), (R, R), (64, 64), 0),
        ((16, 16), (S0, R), (64, 16), 3),
        ((16, 16), (S0, S1), (32, 16), 4),
        ((16, 16), (S0, S0), (64, 8), 7),
        ((16,), (S0, R), (8, 16), 3),
        ((1, 1, 16), (Shard(2), R), (8, 16), 3),
        ((), (R, R), (16, 16), 0),
    ],
)
def test_one_ranks_part_is_filled(
    shape: tuple[int, ...], layout: Layout, size: tuple[float, float], num_cuts: int
) -> None:
    svg = drawing(shape, layout)
    assert filled(svg, HELD) == size
    assert svg.count("<path") == num_cuts
    assert SUM not in svg


def test_parts_of_a_sum_have_another_colour() -> None:
    assert filled(drawing((16, 16), (P, S1)), SUM) == (32, 64)


def test_cuts_between_the_first_and_the_last_dim_lie_behind() -> None:
    svg = drawing((2, 8, 16), (Shard(1), Shard(2)))
    assert svg.count('fill="#888"') == 4
    assert svg.count("<path") == 1  # on the sheet in front


def test_many_cuts_are_drawn_as_some() -> None:
    mesh = MeshShape(names=("dp",), sizes=(512,))
    assert drawing((1024, 64), (S0,), mesh).count("<path") == 15


def test_says_in_words_what_it_shows() -> None:
    words = "float32[16, 8], S(0) along dp 4, S(1) along tp 2: [4, 4] on each rank"
    svg = drawing((16, 8), (S0, S1))
    assert f"<title>{words}</title>" in svg
    assert f'aria-label="{words}"' in svg
