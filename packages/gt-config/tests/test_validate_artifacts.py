"""What cannot be stored yet, with the exact text."""

from asked import found, only

from gt_config import CompileConfig, Violation


def test_graphs_of_runs_placed_by_hand_are_stored():
    assert found(CompileConfig(artifacts="folder")) == ()


def test_a_plan_identifies_no_stored_graph():
    options = CompileConfig(artifacts="folder", autoparallel=True)
    assert only(options) == Violation(
        flag="--compile.artifacts",
        value="folder",
        allowed="None with --compile.autoparallel: the plan is no part of what identifies a "
        "stored graph",
        fix="drop one of the two",
    )
