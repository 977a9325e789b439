"""Passes that keep the dataflow are verified together, and looked at where one alone answers."""

from edited_graphs import EditGraph, ReplaceOperators

from gt_passes import ChangeBounds, GraphPass
from gt_passes.verified_together import groups_of_passes, is_look_due


def keeps(**bounds: object) -> GraphPass:
    allowed = ChangeBounds(**{"peak_memory_growth": None, **bounds})
    return EditGraph(edit=lambda graph_module: None, allowed=allowed)


def test_neighbours_that_keep_the_dataflow_are_verified_together():
    other = ReplaceOperators(edit=lambda graph_module: None)
    assert groups_of_passes([]) == []
    assert groups_of_passes([keeps(), keeps(), other, other, keeps()]) == [
        range(2),
        range(2, 3),
        range(3, 4),
        range(4, 5),
    ]


def test_a_look_is_due_where_a_pass_is_held_to_something_that_its_neighbour_is_not():
    assert not is_look_due(keeps(), keeps(collective_bytes_growth=1.0))
    removes = keeps(collective_bytes_may_shrink=True)
    assert not is_look_due(removes, removes)
    for alone in (removes, keeps(only_removes=True), keeps(peak_memory_growth=0.5)):
        assert is_look_due(alone, keeps())
        assert is_look_due(keeps(), alone)
