"""Where the chunked extent stands in a shape, under views."""

from __future__ import annotations

import pytest

from gt_passes.ep_overlap.chunk_states import Layout, relayout


@pytest.mark.parametrize(
    ("layout", "before", "after", "extent", "expected"),
    [
        # (batch, sequence, model) to tokens and back, batch chunked
        (Layout(dim=0), (4, 6, 8), (24, 8), 4, Layout(dim=0, inner=6)),
        (Layout(dim=0, inner=6), (24, 8), (4, 6, 8), 4, Layout(dim=0)),
        # the same with the sequence chunked
        (Layout(dim=1), (4, 6, 8), (24, 8), 6, Layout(dim=0, outer=4)),
        (Layout(dim=0, outer=4), (24, 8), (4, 6, 8), 6, Layout(dim=1)),
        # heads split off, dimensions of one, tokens times top-k
        (Layout(dim=1), (4, 6, 8), (4, 6, 2, 4), 6, Layout(dim=1)),
        (Layout(dim=0), (4, 6), (1, 4, 6, 1), 4, Layout(dim=1)),
        (Layout(dim=0, outer=4), (24, 2), (48,), 6, Layout(dim=0, outer=4, inner=2)),
        # extents beside it split or merged
        (Layout(dim=1), (4, 6, 8), (2, 2, 48), 6, Layout(dim=2, inner=8)),
    ],
)
def test_follows_the_extent_through_views(
    layout: Layout,
    before: tuple[int, ...],
    after: tuple[int, ...],
    extent: int,
    expected: Layout,
):
    assert relayout(layout, before, after, extent=extent) == expected


@pytest.mark.parametrize("after", [(8, 24), (3, 64)])
def test_no_layout_where_the_extent_is_torn_apart(after: tuple[int, ...]):
    assert relayout(Layout(dim=1), (4, 6, 8), after, extent=6) is None
