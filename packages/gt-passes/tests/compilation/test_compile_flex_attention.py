"""FlexAttention is compiled where nothing else is, each operator in a region of its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from inductor_cases import CountingCompiler, flex_attention_graph, relative_difference
from pass_graphs import capture, program, run_pass
from torch.fx import GraphModule

from gt_passes import CompileFlexAttention, CompileRegions, DescribeOnly, InductorCompiler
from gt_passes.analysis.outlined_region import nodes_with_bodies
from gt_passes.errors import InductorOptionError

OPTIONS = {"max_autotune": True, "coordinate_descent_tuning": True}


def operators(graph_module: GraphModule) -> set[str]:
    return {str(node.target) for node in graph_module.graph.nodes if node.op == "call_function"}


def test_both_directions_are_compiled_once_for_all_layers_with_the_options():
    graph_module, _ = flex_attention_graph(num_layers=3)
    compiler = CountingCompiler()
    report = run_pass(CompileFlexAttention(options=OPTIONS, compiler=compiler), graph_module)
    assert report.counts["regions"] == 6
    assert report.counts["compiled"] == 2
    found = [
        next(str(node.target) for node in body.graph.nodes if node.op == "call_function")
        for body in compiler.bodies
    ]
    assert found == ["flex_attention", "flex_attention_backward"]
    assert compiler.options == [OPTIONS, OPTIONS]
    assert not {"flex_attention", "flex_attention_backward"} & operators(graph_module)
    # Whoever looks into regions still finds them.
    inside = [str(node.target) for node in nodes_with_bodies(graph_module)]
    assert inside.count("flex_attention") == inside.count("flex_attention_backward") == 3


def test_nothing_else_is_compiled():
    graph_module, _ = flex_attention_graph()
    run_pass(CompileFlexAttention(compiler=DescribeOnly()), graph_module)
    assert "aten.relu.default" in operators(graph_module)
    without = capture(lambda x: torch.nn.functional.silu(x).cos(), torch.ones(4))
    before = program(without)
    assert not run_pass(CompileFlexAttention(compiler=DescribeOnly()), without).changed
    assert program(without) == before


def test_running_again_and_compiling_regions_after_it_change_nothing():
    graph_module, _ = flex_attention_graph()
    run_pass(CompileFlexAttention(compiler=DescribeOnly()), graph_module)
    before = program(graph_module)
    for again in (CompileFlexAttention, CompileRegions):
        assert not run_pass(again(compiler=DescribeOnly()), graph_module).changed
    assert program(graph_module) == before


def test_parts_of_one_tensor_that_lie_alike_share_a_program():
    step, inputs = _on_halves(offset=0)
    assert _num_compiled(step, inputs) == 1
    # Loads of four floats at once need what begins at a multiple of 16 bytes.
    step, inputs = _on_halves(offset=1)
    assert _num_compiled(step, inputs) == 2


def _on_halves(offset: int) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """FlexAttention on two halves of a tensor, the second after ``offset`` unused elements."""
    graph_module, (q, _, _, _, *blocks) = flex_attention_graph(num_layers=1, backward=False)

    def step(whole: torch.Tensor, *blocks: torch.Tensor) -> list[torch.Tensor]:
        halves = whole[: q.numel()], whole[q.numel() + offset :]
        return [graph_module(*[half.view(q.shape)] * 3, q, *blocks) for half in halves]

    return step, (torch.randn(2 * q.numel() + offset), *blocks)


def _num_compiled(step: Any, inputs: tuple[torch.Tensor, ...]) -> int:
    graph_module = capture(step, *inputs)
    return run_pass(CompileFlexAttention(compiler=DescribeOnly()), graph_module).counts["compiled"]


def test_refuses_an_option_that_inductor_does_not_have():
    graph_module, _ = flex_attention_graph(num_layers=1)
    with pytest.raises(InductorOptionError, match="tune_well"):
        run_pass(CompileFlexAttention(options={"tune_well": True}), graph_module)


@pytest.mark.slow
def test_the_compiled_forward_is_close_on_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    graph_module, inputs = flex_attention_graph(num_layers=1, backward=False)
    reference = copy.deepcopy(graph_module)
    compiler = InductorCompiler(eager_rounding=False)
    report = run_pass(CompileFlexAttention(compiler=compiler), graph_module)
    assert report.counts["compiled"] == 1
    assert relative_difference(reference(*inputs), graph_module(*inputs)) <= 1e-5
