"""Where the chunked extent stands in a shape, under views."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gt_passes.ep_overlap.chunk_states import Layout, layout_in_view

View = Callable[[torch.Tensor], torch.Tensor]


def shaped(*shape: int) -> View:
    return lambda x: x.view(shape)


@pytest.mark.parametrize(
    ("layout", "before", "view", "extent", "expected"),
    [
        # (batch, sequence, model) to tokens and back, batch chunked
        (Layout(dim=0), (4, 6, 8), shaped(24, 8), 4, Layout(dim=0, inner=6)),
        (Layout(dim=0, inner=6), (24, 8), shaped(4, 6, 8), 4, Layout(dim=0)),
        # the same with the sequence chunked
        (Layout(dim=1), (4, 6, 8), shaped(24, 8), 6, Layout(dim=0, outer=4)),
        (Layout(dim=0, outer=4), (24, 8), shaped(4, 6, 8), 6, Layout(dim=1)),
        # heads split off, dimensions of one, tokens times top-k
        (Layout(dim=1), (4, 6, 8), shaped(4, 6, 2, 4), 6, Layout(dim=1)),
        (Layout(dim=0), (4, 6), shaped(1, 4, 6, 1), 4, Layout(dim=1)),
        (Layout(dim=0, outer=4), (24, 2), shaped(48), 6, Layout(dim=0, outer=4, inner=2)),
        # extents beside it split or merged
        (Layout(dim=1), (4, 6, 8), shaped(2, 2, 48), 6, Layout(dim=2, inner=8)),
        # other views
        (Layout(dim=1), (4, 6, 8), lambda x: x.permute(2, 0, 1), 6, Layout(dim=2)),
        (Layout(dim=1), (4, 6, 8), lambda x: x[2], 6, Layout(dim=0)),
        (Layout(dim=1), (4, 6, 8), lambda x: x[..., 3:5], 6, Layout(dim=1)),
        (Layout(dim=0), (4, 1, 8), lambda x: x.expand(3, 4, 6, 8), 4, Layout(dim=1)),
        (Layout(dim=1), (4, 6, 2), torch.view_as_complex, 6, Layout(dim=1)),
    ],
)
def test_follows_the_extent_through_views(
    layout: Layout, before: tuple[int, ...], view: View, extent: int, expected: Layout
):
    source = torch.empty(before)
    assert layout_in_view(layout, source, view(source), extent=extent) == expected


@pytest.mark.parametrize("after", [(8, 24), (3, 64)])
def test_no_layout_where_the_extent_is_torn_apart(after: tuple[int, ...]):
    source = torch.empty(4, 6, 8)
    assert layout_in_view(Layout(dim=1), source, source.view(after), extent=6) is None


def chunk_of_each_element(shape: tuple[int, ...], layout: Layout, extent: int) -> torch.Tensor:
    """The index of each element along the chunked extent."""
    rows = torch.arange(shape[layout.dim]) // layout.inner % extent
    behind = len(shape) - layout.dim - 1
    return rows.view(-1, *[1] * behind).expand(shape).contiguous()


@st.composite
def views(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[int]]:
    """Two shapes of as many elements, cut from one list of factors, and an order of dimensions."""
    factors = draw(st.lists(st.integers(1, 4), min_size=2, max_size=5))

    def shape() -> tuple[int, ...]:
        places = range(1, len(factors))
        cuts = draw(st.lists(st.sampled_from(places), unique=True).map(sorted))
        pieces = zip([0, *cuts], [*cuts, len(factors)], strict=True)
        return tuple(math.prod(factors[start:stop]) for start, stop in pieces)

    before, after = shape(), shape()
    return before, after, draw(st.permutations(range(len(after))))


@settings(deadline=None)
@given(case=views(), data=st.data())
def test_a_layout_says_of_every_element_to_which_chunk_it_belongs(
    case: tuple[tuple[int, ...], tuple[int, ...], list[int]], data: st.DataObject
):
    before, after, order = case
    dim = data.draw(st.sampled_from(range(len(before))))
    extents = [n for n in range(2, before[dim] + 1) if before[dim] % n == 0]
    if not extents:
        return
    extent = data.draw(st.sampled_from(extents))
    rest = before[dim] // extent
    inner = data.draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0]))
    layout = Layout(dim=dim, outer=rest // inner, inner=inner)
    source = chunk_of_each_element(before, layout, extent)
    view = source.view(after).permute(order)
    found = layout_in_view(layout, source, view, extent=extent)
    if found is not None:
        assert torch.equal(view, chunk_of_each_element(tuple(view.shape), found, extent))
    if before == after and order == sorted(order):
        assert found == layout
