"""CompileWholeGraph: one region with the graph's own inputs, outputs, writes and collectives."""

from __future__ import annotations

import re

import pytest
import torch
from compiled_step_cases import outputs_captured_and_compiled
from device_graphs import capture_on
from expecttest import assert_expected_inline
from fsdp_graphs import gathered, reduce_scattered
from inductor_cases import (
    COMPILER,
    CountingCompiler,
    Model,
    captured_step,
    flex_attention_graph,
    relative_difference,
    run_on,
)
from pass_graphs import capture, collectives, program, run_pass, unshard
from torch._inductor.utils import run_and_get_code

from gt_passes import (
    BucketAllGathers,
    BucketReduceScatters,
    CompileRegions,
    CompileWholeGraph,
    DescribeOnly,
    InductorCompiler,
)
from gt_passes.analysis.outlined_region import nodes_with_bodies
from gt_trace.testing import GlooWorkers

X = torch.linspace(-1, 1, 32).reshape(4, 8)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def test_the_graph_becomes_one_call_with_the_same_interface():
    def step(w, x, unused):
        return x @ unshard(w, group="fsdp"), None, x, x.sin()

    compiler = CountingCompiler()
    graph_module = capture(step, torch.ones(8, 8), X, X + 1)
    report = run_pass(CompileWholeGraph(compiler=compiler), graph_module)
    assert_expected_inline(
        program(graph_module),
        """\
run_region = run_region(inductor_graph_0, w_1, x_1)
getitem = getitem(run_region, 0)
getitem_1 = getitem(run_region, 1)
return [getitem, None, x_1, getitem_1]
""",
    )
    assert report.counts == {"nodes": 4}
    found = [node.name for node in nodes_with_bodies(graph_module)]
    assert found.index("run_region") < found.index("all_gather_into_tensor")


@pytest.mark.slow  # compiles with Inductor
def test_compiles_what_copies_into_buckets_and_out_of_them(one_rank_group):
    bf16, f32 = torch.bfloat16, torch.float32

    def step(a, b, x):
        options = {"num_ranks": 1, "group": one_rank_group}
        y = x @ gathered(a, "layers.0.a", dtype=bf16, **options).t()
        y = y * gathered(b, "layers.0.b", dtype=bf16, **options)
        first = reduce_scattered(y.t() @ x, "layers.0.a", dtype=f32, **options)
        return y, first, reduce_scattered(y.sum(0), "layers.0.b", dtype=f32, **options)

    inputs = (torch.randn(8, 8), torch.randn(8), X.bfloat16())
    graph_module = capture(step, *inputs)
    expected = graph_module(*inputs)
    for bucketing in (BucketAllGathers(), BucketReduceScatters()):
        assert run_pass(bucketing, graph_module).changed
    assert all(map(torch.equal, graph_module(*inputs), expected))
    run_pass(CompileWholeGraph(compiler=COMPILER), graph_module)
    assert all(map(torch.equal, graph_module(*inputs), expected))


def test_a_graph_without_operators_stays_as_it_is():
    graph_module = capture(lambda x: x, X)
    assert not run_pass(CompileWholeGraph(compiler=CountingCompiler()), graph_module).changed


def test_running_again_changes_nothing():
    graph_module = capture(lambda x: x.sin(), X)
    run_pass(CompileWholeGraph(compiler=DescribeOnly()), graph_module)
    before = program(graph_module)
    report = run_pass(CompileWholeGraph(compiler=DescribeOnly()), graph_module)
    assert not report.changed
    assert program(graph_module) == before


def test_cannot_compile_what_is_compiled_in_part():
    graph_module, _ = flex_attention_graph(num_layers=1)
    run_pass(CompileRegions(compiler=DescribeOnly()), graph_module)
    report = run_pass(CompileWholeGraph(compiler=DescribeOnly()), graph_module)
    assert_expected_inline(
        "\n".join(map(str, report.refusals)),
        """\
run_region: a part of the graph is compiled already, and a compiler cannot look inside
run_region_1: a part of the graph is compiled already, and a compiler cannot look inside""",
    )


def test_a_compiled_step_stays_close_and_still_updates_its_buffers():
    torch.manual_seed(0)
    model = Model()
    step = captured_step(model, X)
    _, before = run_on(CompileWholeGraph(compiler=COMPILER), step)
    expected_loss, expected = step.bind(model, executable=before)(X)
    assert model.num_steps.item() == 1
    for num_steps in (2, 3):
        loss, gradients = step.bind(model)(X)
        assert relative_difference(expected_loss, loss) <= 1e-5
        assert all(
            relative_difference(a, b) <= 1e-4 for a, b in zip(expected, gradients, strict=True)
        )
        assert model.num_steps.item() == num_steps


def test_sizes_that_depend_on_data_stay_open():
    def step(x, counts):
        first, second = counts.tolist()
        torch._check(first >= 0)
        torch._check(second >= 0)
        torch._check(first + second == x.shape[0])
        head, tail = torch.split(x, [first, second])
        return head.sin().sum(), (tail * 2).sum(0)

    graph_module = capture_on(step, X, torch.tensor([1, 3]), device="cpu")
    run_pass(CompileWholeGraph(compiler=COMPILER), graph_module)
    for counts in ([1, 3], [3, 1]):
        expected = step(X, torch.tensor(counts))
        for wanted, got in zip(expected, graph_module(X, torch.tensor(counts)), strict=True):
            assert relative_difference(wanted, got) <= 1e-6


def test_inductor_keeps_the_order_of_collectives(one_rank_group):
    def step(a, b, c):
        gathered = [collectives.all_gather_into_tensor(w, 1, one_rank_group) for w in (a, b, c)]
        last, first = collectives.wait_tensor(gathered[2]), collectives.wait_tensor(gathered[0])
        reduced = collectives.all_reduce(last.sin() + first, "sum", one_rank_group)
        return collectives.wait_tensor(reduced), collectives.wait_tensor(gathered[1]).cos()

    graph_module = capture(step, X, X + 1, X + 2)
    wanted = _collectives_of(program(graph_module))
    _, codes = run_and_get_code(run_pass, CompileWholeGraph(compiler=COMPILER), graph_module)
    assert _collectives_of(codes[0]) == wanted
    results = graph_module(X, X + 1, X + 2)
    assert torch.allclose(results[0], (X + 2).sin() + X)
    assert torch.allclose(results[1], (X + 1).cos())


def _collectives_of(text: str) -> list[str]:
    """Launches and waits, in the order in which a program calls them."""
    called = re.findall(r"_c10d_functional\.(\w+?)_?\.default\(", text)
    return [name.removesuffix("_tensor_out") for name in called]


def test_no_option_of_inductor_stays_changed():
    before = torch._inductor.config.get_config_copy()
    run_pass(CompileWholeGraph(compiler=COMPILER), capture(lambda x: x.sin() + 1, X))
    assert torch._inductor.config.get_config_copy() == before


def test_what_the_caller_asks_for_wins_over_the_compilers_own():
    compiler = InductorCompiler(options={"reorder_for_locality": True})
    options = compiler.effective_options({"fallback_random": False})
    assert options["reorder_for_locality"]
    assert not options["fallback_random"]
    assert not options["reorder_for_peak_memory"]
    assert options["emulate_precision_casts"]
    relaxed = InductorCompiler(eager_rounding=False, keep_order=False).effective_options({})
    assert set(relaxed) == {"fallback_random", "keep_output_stride", "triton.cudagraphs"}


@pytest.mark.slow
def test_a_sharded_step_stays_close_on_two_ranks():
    with GlooWorkers(2, timeout=300) as workers:
        for captured, compiled in workers.run(outputs_captured_and_compiled):
            assert len(captured) == len(compiled) == 4
            for expected, got in zip(captured, compiled, strict=True):
                assert relative_difference(expected, got) <= 1e-4
