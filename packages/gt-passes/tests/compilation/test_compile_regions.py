"""Which regions CompileRegions makes, what it leaves out of them, and that results stay close."""

from __future__ import annotations

import copy

import pytest
import torch
from expecttest import assert_expected_inline
from inductor_cases import (
    COMPILER,
    CountingCompiler,
    Model,
    captured_step,
    flex_attention_graph,
    relative_difference,
    run_on,
)
from pass_graphs import capture, collectives, program, run_pass, same_bits, unshard
from torch.fx.traceback import annotate

from gt_config.node_keys import ModuleAnnotation
from gt_passes import CompileRegions, DescribeOnly
from gt_passes.errors import InductorOptionError
from gt_trace.annotate import annotate as annotate_concept

X = torch.linspace(-1, 1, 32).reshape(4, 8)
INDUCTOR = {"compile_with_inductor": {}}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def tagged_step(x, w):
    with annotate(INDUCTOR):
        y = (x * 2).sin()
        z = y + w
    return z.cos() @ w


def test_can_make_a_region_of_tagged_nodes():
    graph_module = capture(tagged_step, torch.ones(8, 8), torch.ones(8, 8))
    compiler = CountingCompiler()
    report = run_pass(CompileRegions(compiler=compiler), graph_module)
    assert_expected_inline(
        program(graph_module),
        """\
run_region = run_region(inductor_region_0, x_1, w_1)
getitem = getitem(run_region, 0)
cos = aten.cos.default(getitem)
mm = aten.mm.default(cos, w_1)
return mm
""",
    )
    (body,) = compiler.bodies
    assert_expected_inline(
        program(body),
        """\
mul = aten.mul.Tensor(x_1, 2)
sin = aten.sin.default(mul)
add = aten.add.Tensor(sin, w_1)
return [add]
""",
    )
    assert report.counts == {"regions": 1, "compiled": 1, "nodes": 3}
    assert report.refusals == ()


def test_a_graph_without_chosen_nodes_stays_as_it_is():
    graph_module = capture(lambda x: x.sin().cos(), X)
    before = program(graph_module)
    assert not run_pass(CompileRegions(compiler=CountingCompiler()), graph_module).changed
    assert program(graph_module) == before


def test_running_again_changes_nothing():
    graph_module, _ = flex_attention_graph()
    run_pass(CompileRegions(compiler=DescribeOnly()), graph_module)
    before = program(graph_module)
    assert not run_pass(CompileRegions(compiler=DescribeOnly()), graph_module).changed
    assert program(graph_module) == before


def test_flex_attention_is_compiled_in_both_directions_without_being_asked_for():
    graph_module, _ = flex_attention_graph()
    compiler = CountingCompiler()
    report = run_pass(CompileRegions(compiler=compiler), graph_module)
    bodies = [
        next(str(node.target) for node in body.graph.nodes if node.op == "call_function")
        for body in compiler.bodies
    ]
    assert bodies == ["flex_attention", "flex_attention_backward"]  # of two layers, each once
    assert report.counts == {"regions": 4, "compiled": 2, "nodes": 18}
    left = {str(node.target) for node in graph_module.graph.nodes}
    assert not left & {"flex_attention", "flex_attention_backward", "sdpa_score0", "mask_graph0"}
    # The mask and score functions went along.
    masks = [node.target for node in compiler.bodies[0].graph.find_nodes(op="get_attr")]
    assert len(masks) == 2
    assert all(isinstance(getattr(compiler.bodies[0], mask), torch.nn.Module) for mask in masks)


def test_flex_attention_with_another_mask_is_another_program():
    (same, _), (other, _) = flex_attention_graph(), flex_attention_graph()
    for node in other.graph.find_nodes(op="get_attr"):
        subgraph = getattr(other, node.target)
        for comparison in subgraph.graph.find_nodes(
            op="call_function", target=torch.ops.aten.ge.Tensor
        ):
            if node.target.endswith("1"):  # of the second layer
                comparison.target = torch.ops.aten.gt.Tensor
    for graph_module, num_compiled in ((same, 2), (other, 4)):
        report = run_pass(CompileRegions(compiler=DescribeOnly()), graph_module)
        assert report.counts["compiled"] == num_compiled


def test_flex_attention_forward_compiles_on_cpu():
    graph_module, inputs = flex_attention_graph(num_layers=1, backward=False)
    reference = copy.deepcopy(graph_module)
    report = run_pass(CompileRegions(compiler=COMPILER), graph_module)
    assert report.counts["compiled"] == 1
    assert relative_difference(reference(*inputs), graph_module(*inputs)) <= 1e-5


def test_layers_that_are_equal_are_compiled_once():
    step = captured_step(Model(), X)
    compiler = CountingCompiler()
    patterns = ("layers.*.feed_forward",)
    report, _ = run_on(CompileRegions(module_patterns=patterns, compiler=compiler), step)
    assert report.counts["regions"] == 4  # two layers, forward and backward
    assert len(compiler.bodies) == report.counts["compiled"] == 2
    names = [node.target for node in step.graph_module.graph.find_nodes(op="get_attr")]
    assert names == [
        "inductor_region_0", "inductor_region_0", "inductor_region_1", "inductor_region_1",
    ]  # fmt: skip


def test_compiled_regions_stay_close_to_the_captured_ones():
    torch.manual_seed(0)
    model = Model()
    step = captured_step(model, X)
    patterns = ("layers.*.feed_forward", "layers.*.norm")
    report, before = run_on(CompileRegions(module_patterns=patterns, compiler=COMPILER), step)
    assert report.counts["nodes"] > 50
    expected_loss, expected = step.bind(model, executable=before)(X)
    loss, gradients = step.bind(model)(X)
    assert relative_difference(expected_loss, loss) <= 1e-5
    assert all(relative_difference(a, b) <= 1e-5 for a, b in zip(expected, gradients, strict=True))
    # A second call must not find anything that the first left behind.
    assert all(map(same_bits, gradients, step.bind(model)(X)[1]))


def test_a_write_to_memory_of_the_region_alone_goes_along():
    def step(x):
        with annotate(INDUCTOR):
            mean = x.square().mean(1, keepdim=True)
            mean.add_(1e-6)
            return x * mean.rsqrt()

    graph_module = capture(step, X)
    reference = copy.deepcopy(graph_module)
    report = run_pass(CompileRegions(compiler=COMPILER), graph_module)
    assert report.refusals == ()
    assert report.counts["nodes"] == 5
    assert relative_difference(reference(X), graph_module(X)) <= 1e-6


def test_cannot_take_in_what_is_written_to_outside():
    def step(x):
        with annotate(INDUCTOR):
            y = x.sin()
            z = y.view(8, 4)
            kept = x.cos() + 1
        y.add_(1)
        with annotate(INDUCTOR):
            return z * 2, kept * 3

    graph_module = capture(step, X)
    report = run_pass(CompileRegions(compiler=DescribeOnly()), graph_module)
    assert_expected_inline(
        "\n".join(map(str, report.refusals)),
        """\
sin: it shares memory that is written to outside its region
view: it shares memory that is written to outside its region""",
    )
    assert same_bits(graph_module(X), step(X))


def test_cannot_take_in_effects_and_random_numbers():
    def step(x, state):
        with annotate(INDUCTOR):
            y = torch.nn.functional.dropout(x, 0.5)
            state.add_(1)
            torch.ops.aten._assert_async.msg((y == y).all(), "not a number")
            return y.sin() + state

    report = run_pass(CompileRegions(compiler=DescribeOnly()), capture(step, X, torch.zeros(())))
    assert_expected_inline(
        "\n".join(map(str, report.refusals)),
        """\
empty_like: it shares memory that is written to outside its region
bernoulli_: it draws random numbers
div_: it shares memory that is written to outside its region
add_: it writes to an input of the graph
_assert_async: aten._assert_async.msg has an effect besides its result""",
    )


def test_nothing_moves_across_an_unknown_operator():
    with torch.library._scoped_library("gt_passes_test", "DEF") as library:
        library.define("log(Tensor x) -> Tensor")
        library.impl("log", lambda x: x.clone(), "CompositeExplicitAutograd")

        def step(x):
            with annotate(INDUCTOR):
                y = x.sin() * 2
            other = torch.ops.gt_passes_test.log(x)
            with annotate(INDUCTOR):
                return x.cos() * 3 + y, other

        graph_module = capture(step, X)
        report = run_pass(CompileRegions(compiler=DescribeOnly()), graph_module)
    assert report.counts["regions"] == 2
    assert_expected_inline(
        program(graph_module),
        """\
run_region = run_region(inductor_region_0, x_1)
getitem = getitem(run_region, 0)
log = gt_passes_test.log.default(x_1)
run_region_1 = run_region(inductor_region_1, x_1, getitem)
getitem_1 = getitem(run_region_1, 0)
return [getitem_1, log]
""",
    )


def test_collectives_and_waits_end_a_region_and_stay_where_they_are():
    """
    sin ── all-gather ── cos ── wait ── mul ── add   =>   [sin] all-gather [cos] wait [mul add]
    """

    def step(x, w):
        with annotate_concept(ModuleAnnotation(fqn="layers.0.feed_forward")):
            y = x.sin()
            gathered = collectives.all_gather_into_tensor(w, 2, "fsdp")
            z = x.cos()
            w = collectives.wait_tensor(gathered)
            return (y * z) + w

    graph_module = capture(step, torch.ones(4, 8), torch.ones(2, 8))
    patterns = ("layers.*.feed_forward",)
    run_pass(CompileRegions(module_patterns=patterns, compiler=DescribeOnly()), graph_module)
    assert_expected_inline(
        program(graph_module),
        """\
run_region = run_region(inductor_region_0, x_1)
getitem = getitem(run_region, 0)
all_gather_into_tensor = _c10d_functional.all_gather_into_tensor.default(w_1, 2, fsdp)
run_region_1 = run_region(inductor_region_1, x_1)
getitem_1 = getitem(run_region_1, 0)
wait_tensor = _c10d_functional.wait_tensor.default(all_gather_into_tensor)
run_region_2 = run_region(inductor_region_2, getitem, getitem_1, wait_tensor)
getitem_2 = getitem(run_region_2, 0)
return getitem_2
""",
    )


def test_regions_whose_tags_differ_stay_apart_and_get_their_options():
    def step(x):
        with annotate({"compile_with_inductor": {"inductor_region": "a"}}):
            y = x.sin().cos()
        with annotate({"compile_with_inductor": {"inductor_configs": {"max_autotune": True}}}):
            return y.exp().tan()

    compiler = CountingCompiler()
    run_pass(CompileRegions(compiler=compiler), capture(step, X))
    assert compiler.options == [{}, {"max_autotune": True}]


def test_an_option_that_inductor_lacks_is_refused_by_name():
    def step(x):
        with annotate({"compile_with_inductor": {"inductor_configs": {"max_autotone": True}}}):
            return x.sin()

    graph_module = capture(step, X)
    with pytest.raises(InductorOptionError) as raised:
        run_pass(CompileRegions(compiler=COMPILER), graph_module)
    assert_expected_inline(
        str(raised.value),
        """Inductor has no option 'max_autotone': torch._inductor.list_options() lists those of the installed PyTorch""",
    )


def test_gathered_parameters_are_inputs_of_a_region():
    def step(x, w):
        with annotate_concept(ModuleAnnotation(fqn="layers.0")):
            return (x @ unshard(w, group="fsdp", dtype=torch.bfloat16).float()).sin()

    compiler = CountingCompiler()
    graph_module = capture(step, torch.ones(4, 4), torch.ones(4, 4))
    run_pass(CompileRegions(module_patterns=("layers.*",), compiler=compiler), graph_module)
    assert_expected_inline(
        program(compiler.bodies[0]),
        """\
_to_copy_1 = aten._to_copy.default(wait_tensor, dtype=torch.float32)
mm = aten.mm.default(x_1, _to_copy_1)
sin = aten.sin.default(mm)
return [sin]
""",
    )


MEMORY_BOUND = {"module_patterns": (), "memory_bound": True}


def test_can_make_regions_of_all_that_memory_bounds():
    """A norm and an activation, forward and backward, in each of two equal layers; no product."""
    step = captured_step(Model(), X)
    compiler = CountingCompiler()
    report, _ = run_on(CompileRegions(compiler=compiler, **MEMORY_BOUND), step)
    inside = [
        [str(node.target) for node in body.graph.nodes if node.op == "call_function"]
        for body in compiler.bodies
    ]
    assert report.refusals == ()
    assert any("aten.rsqrt.default" in each and "aten.mul.Tensor" in each for each in inside)
    assert not any("mm" in target for each in inside for target in each)
    left = {str(node.target) for node in step.graph_module.graph.nodes}
    assert "aten.mm.default" in left
    assert "aten.rsqrt.default" not in left
    # Without it, as before, a graph that nobody tagged stays as it is.
    assert not run_on(CompileRegions(compiler=compiler), captured_step(Model(), X))[0].changed


def test_the_cast_to_float8_with_its_scale_is_one_region():
    """Scale by the largest element, as torchao's tensor-wise float8 does, and cast."""

    def step(x):
        scale = 448.0 / torch.max(torch.abs(x)).double().clamp(min=1e-12)
        return (x * scale.float()).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)

    compiler = CountingCompiler()
    graph_module = capture(step, torch.ones(4, 4))
    run_pass(CompileRegions(compiler=compiler, **MEMORY_BOUND), graph_module)
    (body,) = compiler.bodies
    inside = [str(n.target) for n in body.graph.nodes if n.op == "call_function"]
    assert "aten.max.default" in inside
    assert not any(str(node.target).startswith("aten") for node in graph_module.graph.nodes)


@pytest.mark.slow  # compiles with Inductor
def test_what_memory_bounds_stays_close_to_the_captured():
    torch.manual_seed(0)
    model = Model()
    step = captured_step(model, X)
    _, before = run_on(CompileRegions(compiler=COMPILER, **MEMORY_BOUND), step)
    expected_loss, expected = step.bind(model, executable=before)(X)
    loss, gradients = step.bind(model)(X)
    assert relative_difference(expected_loss, loss) <= 1e-5
    assert all(relative_difference(a, b) <= 1e-5 for a, b in zip(expected, gradients, strict=True))


def test_what_memory_bounds_runs_behind_communication_that_does_not_depend_on_it():
    """
    sin ── all-gather ── cos ── wait ── mul   =>   all-gather ── wait ── [sin cos mul]

    Neither views of what comes from outside, nor complex numbers, nor one operator alone.
    """

    def step(x, w):
        y = x.sin()
        gathered = collectives.all_gather_into_tensor(w, 2, "fsdp")
        z = x.cos()
        w = collectives.wait_tensor(gathered)
        product = (y * z).mm(w.t())
        return torch.view_as_real(torch.view_as_complex(product.view(4, 2, 2)) * 1j), x.exp()

    graph_module = capture(step, torch.ones(4, 8), torch.ones(2, 8))
    run_pass(CompileRegions(compiler=DescribeOnly(), **MEMORY_BOUND), graph_module)
    assert_expected_inline(
        program(graph_module),
        """\
all_gather_into_tensor = _c10d_functional.all_gather_into_tensor.default(w_1, 2, fsdp)
wait_tensor = _c10d_functional.wait_tensor.default(all_gather_into_tensor)
run_region = run_region(inductor_region_0, x_1)
getitem = getitem(run_region, 0)
t = aten.t.default(wait_tensor)
mm = aten.mm.default(getitem, t)
view = aten.view.default(mm, [4, 2, 2])
view_as_complex = aten.view_as_complex.default(view)
mul_1 = aten.mul.Tensor(view_as_complex, 1j)
view_as_real = aten.view_as_real.default(mul_1)
exp = aten.exp.default(x_1)
return [view_as_real, exp]
""",
    )
