"""When ReshardAfterForward gathers again for the backward, and when it must not."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from fsdp_graphs import gathered
from pass_graphs import capture, program, run_pass

from gt_passes import ReshardAfterForward
from gt_trace import collective_counts
from gt_trace.annotate import phase
from gt_trace.node_metadata import phase_of

W = torch.ones(2, 4)
V = torch.ones(2, 4)  # the same tensor twice would be one input
X = torch.ones(3, 4)
DZ = torch.ones(3, 4)


def step(w, v, x, dz):
    with phase("forward"):
        t = gathered(w, "layers.0.w").t()
        y = x @ t
        u = gathered(v, "layers.1.v")
        z = y @ u
    with phase("backward"):
        dy = dz @ u.t()
        return z, dy @ t.t()


def test_can_gather_again_with_the_views_that_the_backward_reads():
    """
    w ── all-gather ── t ─┬─ mm            w ── all-gather ── t ─── mm
                          └─ mm (dx)  =>   w ── all-gather ── t ─── mm (dx)
    """
    graph_module = capture(step, W, V, X, DZ)
    report = run_pass(ReshardAfterForward(), graph_module)
    assert_expected_inline(
        program(graph_module),
        """\
all_gather_into_tensor = _c10d_functional.all_gather_into_tensor.default(w_1, 2, fsdp)
wait_tensor = _c10d_functional.wait_tensor.default(all_gather_into_tensor)
t = aten.t.default(wait_tensor)
mm = aten.mm.default(x_1, t)
all_gather_into_tensor_1 = _c10d_functional.all_gather_into_tensor.default(v_1, 2, fsdp)
wait_tensor_1 = _c10d_functional.wait_tensor.default(all_gather_into_tensor_1)
mm_1 = aten.mm.default(mm, wait_tensor_1)
t_1 = aten.t.default(wait_tensor_1)
mm_2 = aten.mm.default(dz_1, t_1)
all_gather_into_tensor_again = _c10d_functional.all_gather_into_tensor.default(w_1, 2, fsdp)
wait_tensor_again = _c10d_functional.wait_tensor.default(all_gather_into_tensor_again)
t_again = aten.t.default(wait_tensor_again)
t_2 = aten.t.default(t_again)
mm_3 = aten.mm.default(mm_2, t_2)
return [mm_1, mm_3]
""",
    )
    assert report.counts == {"gathered_again": 1}
    again = [node for node in graph_module.graph.nodes if node.name.endswith("_again")]
    assert {phase_of(node) for node in again} == {"backward"}


def test_the_last_can_be_gathered_again_too():
    graph_module = capture(step, W, V, X, DZ)
    assert run_pass(ReshardAfterForward(keep_last=False), graph_module).counts == {
        "gathered_again": 2
    }
    assert collective_counts(graph_module) == {"all_gather_into_tensor": 4}


def test_running_again_changes_nothing():
    graph_module = capture(step, W, V, X, DZ)
    run_pass(ReshardAfterForward(), graph_module)
    before = program(graph_module)
    assert not run_pass(ReshardAfterForward(), graph_module).changed
    assert program(graph_module) == before


def test_what_the_backward_does_not_read_is_gathered_once():
    def step(w, x):
        with phase("forward"):
            return x @ gathered(w, "layers.0.w")

    graph_module = capture(step, W, X)
    assert not run_pass(ReshardAfterForward(keep_last=False), graph_module).changed


def test_a_parameter_that_is_written_to_is_kept():
    def written(w, x, dz):
        with phase("forward"):
            whole = gathered(w, "layers.0.w")
            y = x @ whole
            w.add_(1)
        with phase("backward"):
            return y, dz @ whole.t()

    graph_module = capture(written, W, X, DZ)
    report = run_pass(ReshardAfterForward(keep_last=False), graph_module)
    assert not report.changed
    assert [each.reason for each in report.refusals] == ["w_1 shares memory that is written to"]


def test_a_gathered_value_that_is_an_output_is_kept():
    def shown(w, x, dz):
        with phase("forward"):
            whole = gathered(w, "layers.0.w")
            y = x @ whole
        with phase("backward"):
            return y, dz @ whole.t(), whole

    graph_module = capture(shown, W, X, DZ)
    report = run_pass(ReshardAfterForward(keep_last=False), graph_module)
    assert not report.changed
    assert [each.reason for each in report.refusals] == ["the gathered value is an output"]
