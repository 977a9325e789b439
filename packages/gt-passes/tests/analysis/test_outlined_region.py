"""Regions: what they keep of the nodes they stand for, and what the rest of a graph sees of them."""

from __future__ import annotations

import copy

import torch
from expecttest import assert_expected_inline
from pass_graphs import capture, node_of, program

from gt_config.node_keys import PhaseAnnotation
from gt_passes import Verifier
from gt_passes.analysis.aliasing import AliasClasses, has_unknown_effects, written_nodes
from gt_passes.analysis.operator_effects import draws_random_numbers, is_barrier
from gt_passes.analysis.outlined_region import (
    OutlinedRegion,
    RegionOutliner,
    nodes_with_bodies,
    region_of,
)
from gt_trace.annotate import phase
from gt_trace.node_metadata import phase_of

X = torch.linspace(-1, 1, 8)


def outlined(graph_module, *names, runner=None):
    """Make one region of the named nodes."""
    outliner = RegionOutliner(graph_module)
    outline = outliner.outline([node_of(graph_module, name) for name in names])
    body = outliner.body(outline)
    call = outliner.replace(outline, OutlinedRegion(body, runner or body), stem="region")
    outliner.finish()
    graph_module.recompile()
    return call


def test_a_region_runs_its_runner_on_real_tensors_and_its_body_on_fake_ones():
    graph_module = capture(lambda x: x.sin().cos(), X)
    outlined(graph_module, "sin", "cos", runner=lambda x: (x + 100,))
    assert torch.equal(graph_module(X), X + 100)
    assert Verifier().verify(graph_module).problems == ()


def test_the_verifier_sees_a_wrong_body():
    graph_module = capture(lambda x: x.sin().cos(), X)
    call = outlined(graph_module, "sin", "cos")
    (cos,) = region_of(call).body.graph.find_nodes(
        op="call_function", target=torch.ops.aten.cos.default
    )
    cos.target = torch.ops.aten.mean.default
    region_of(call).body.recompile()
    (problem,) = Verifier().verify(graph_module).problems
    assert_expected_inline(
        "\n".join(str(problem).splitlines()[1:]),
        """\
its recorded fake value is not what its operator gives on its inputs
expected (shape [], stride [], dtype torch.float32, device cpu)
got      (shape [8], stride [1], dtype torch.float32, device cpu)""",
    )


def test_one_region_may_read_another():
    graph_module = capture(lambda x: x.sin().cos().exp(), X)
    outliner = RegionOutliner(graph_module)
    for name in ("sin", "cos"):
        outline = outliner.outline([node_of(graph_module, name)])
        body = outliner.body(outline)
        outliner.replace(outline, OutlinedRegion(body, body), stem="region")
    outliner.finish()
    assert_expected_inline(
        program(graph_module),
        """\
run_region = run_region(region_0, x_1)
getitem = getitem(run_region, 0)
run_region_1 = run_region(region_1, getitem)
getitem_1 = getitem(run_region_1, 0)
exp = aten.exp.default(getitem_1)
return exp
""",
    )


def test_constants_are_inputs_of_a_region():
    constant = torch.arange(8.0)
    graph_module = capture(lambda x: (x + constant).sin(), X)
    outlined(graph_module, "add", "sin")
    graph_module.recompile()
    assert torch.equal(graph_module(X), (X + constant).sin())
    assert Verifier().verify(graph_module).problems == ()


def test_a_copied_graph_shares_its_regions():
    graph_module = capture(lambda x: x.sin(), X)
    call = outlined(graph_module, "sin")
    twin = copy.deepcopy(graph_module)
    assert region_of(node_of(twin, call.name)) is region_of(call)
    assert torch.equal(twin(X), X.sin())


def test_a_region_has_the_phase_on_which_its_nodes_agree():
    def step(x):
        with phase("forward"):
            y = x.sin().cos()
        with phase("backward"):
            return y.exp().tan()

    same, mixed = capture(step, X), capture(step, X)
    assert phase_of(outlined(same, "sin", "cos")) == PhaseAnnotation(phase="forward").phase
    assert phase_of(outlined(mixed, "cos", "exp")) is None


def test_a_region_writes_and_shares_what_its_nodes_do():
    def step(state, x):
        state.add_(1)
        return x.view(2, 4), x.sin(), torch.rand(3)

    graph_module = capture(step, torch.zeros(3), X)
    call = outlined(graph_module, "add_", "view", "sin", "rand")
    state, x = graph_module.graph.find_nodes(op="placeholder")
    assert list(written_nodes(call)) == [state]
    aliases = AliasClasses(graph_module.graph)
    assert aliases.is_written(state)
    assert not aliases.is_written(x)
    assert aliases.class_of(x) is aliases.class_of(call)
    assert aliases.class_of(state) is not aliases.class_of(call)
    assert not has_unknown_effects(call)
    assert not is_barrier(call)
    assert draws_random_numbers(call)


def test_a_region_with_an_unknown_operator_is_a_barrier():
    with torch.library._scoped_library("gt_passes_test", "DEF") as library:
        library.define("log(Tensor x) -> Tensor")
        library.impl("log", lambda x: x.clone(), "CompositeExplicitAutograd")
        graph_module = capture(lambda x: torch.ops.gt_passes_test.log(x), X)
        assert is_barrier(outlined(graph_module, "log"))


def test_bodies_are_found_at_any_depth():
    graph_module = capture(lambda x: x.sin().cos(), X)
    call = outlined(graph_module, "sin")
    outlined(graph_module, call.name, "getitem", "cos")
    names = [node.name for node in nodes_with_bodies(graph_module)]
    assert names.count("sin") == names.count("cos") == 1
