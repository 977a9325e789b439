"""ScheduleFsdpIntoDenseRegions keeps FSDP communication out of routed-expert regions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from expecttest import assert_expected_inline
from fsdp_graphs import gathered, of_unknown_effect, reduce_scattered
from pass_graphs import capture, collectives, program, run_pass

from gt_config.node_keys import EpRegionAnnotation, EpRegionKind
from gt_passes import ScheduleFsdpIntoDenseRegions
from gt_trace.annotate import annotate

W = torch.ones(2, 4)
X = torch.ones(4, 4)
DZ = torch.ones(4, 4)


@contextmanager
def region(kind: EpRegionKind) -> Iterator[None]:
    with annotate(EpRegionAnnotation(kind=kind)):
        yield


def dispatched(x: torch.Tensor) -> torch.Tensor:
    with region("dispatch"):
        return collectives.wait_tensor(collectives.all_to_all_single(x, [2, 2], [2, 2], "ep"))


def combined(x: torch.Tensor) -> torch.Tensor:
    with region("combine"):
        return collectives.wait_tensor(collectives.all_to_all_single(x, [2, 2], [2, 2], "ep"))


def experts(x: torch.Tensor) -> torch.Tensor:
    with region("compute"):
        return x * 2


def test_gatherings_go_in_front_of_the_region_and_reductions_behind_it():
    """
    network  [= dispatch =][= g =]   [= r =][= combine =]        [= g =][= dispatch =]   [= combine =][= r =]
    compute                       *2                        =>                        *2
    """

    def step(w, x, dz):
        there = dispatched(x.cos())
        whole = gathered(w, "layers.1.w")
        done = experts(there)
        reduced = reduce_scattered(dz.sin(), "layers.2.v")
        return combined(done) @ whole, reduced

    graph_module = capture(step, W, X, DZ)
    report = run_pass(ScheduleFsdpIntoDenseRegions(), graph_module)
    assert report.counts == {"launches_moved": 2}
    assert report.refusals == ()
    assert_expected_inline(
        program(graph_module),
        """\
cos = aten.cos.default(x_1)
all_gather_into_tensor = _c10d_functional.all_gather_into_tensor.default(w_1, 2, fsdp)
all_to_all_single = _c10d_functional.all_to_all_single.default(cos, [2, 2], [2, 2], ep)
wait_tensor = _c10d_functional.wait_tensor.default(all_to_all_single)
wait_tensor_1 = _c10d_functional.wait_tensor.default(all_gather_into_tensor)
mul = aten.mul.Tensor(wait_tensor, 2)
sin = aten.sin.default(dz_1)
all_to_all_single_1 = _c10d_functional.all_to_all_single.default(mul, [2, 2], [2, 2], ep)
wait_tensor_3 = _c10d_functional.wait_tensor.default(all_to_all_single_1)
reduce_scatter_tensor = _c10d_functional.reduce_scatter_tensor.default(sin, sum, 2, fsdp)
wait_tensor_2 = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
div = aten.div.Tensor(wait_tensor_2, 2)
mm = aten.mm.default(wait_tensor_3, wait_tensor_1)
return [mm, div]
""",
    )
    before = program(graph_module)
    assert not run_pass(ScheduleFsdpIntoDenseRegions(), graph_module).changed
    assert program(graph_module) == before


def test_what_the_region_makes_and_needs_stays():
    def step(w, x):
        there = dispatched(x)
        whole = gathered(w + there[:2], "layers.1.w")
        reduced = reduce_scattered(experts(there), "layers.2.v")
        return combined(experts(there) + reduced.repeat(2, 1)) @ whole

    graph_module = capture(step, W, X)
    before = program(graph_module)
    report = run_pass(ScheduleFsdpIntoDenseRegions(), graph_module)
    assert not report.changed
    assert [each.reason for each in report.refusals] == [
        "it needs wait_tensor",
        "all_to_all_single_1 is a collective that is not FSDP's",
    ]
    assert program(graph_module) == before


def test_nothing_moves_across_an_operator_of_unknown_effect():
    def step(w, x, dz):
        there = of_unknown_effect(dispatched(x))
        whole = gathered(w, "layers.1.w")
        reduced = reduce_scattered(dz, "layers.2.v")
        return combined(of_unknown_effect(experts(there))) @ whole, reduced

    graph_module = capture(step, W, X, DZ)
    before = program(graph_module)
    report = run_pass(ScheduleFsdpIntoDenseRegions(), graph_module)
    assert not report.changed
    assert [each.reason for each in report.refusals] == [
        "a barrier stands between it and wait_tensor",
        "a barrier stands between it and wait_tensor_3",
    ]
    assert program(graph_module) == before


def test_a_gradient_that_is_overwritten_after_it_is_reduced_stays():
    def step(x, dz):
        there = dispatched(x)
        gradient = dz * 2
        reduced = reduce_scattered(gradient, "layers.2.v")
        gradient.mul_(2)
        return combined(experts(there)), reduced, gradient

    graph_module = capture(step, X, DZ)
    before = program(graph_module)
    report = run_pass(ScheduleFsdpIntoDenseRegions(), graph_module)
    assert not report.changed
    assert [each.reason for each in report.refusals] == ["mul shares memory that is written to"]
    assert program(graph_module) == before


def test_graphs_without_expert_regions_are_left_alone():
    def step(w, x):
        return x @ gathered(w, "layers.0.w")

    graph_module = capture(step, W, X)
    assert not run_pass(ScheduleFsdpIntoDenseRegions(), graph_module).changed
