"""What a compiled step keeps for its backward: what takes less memory than its operands."""

from __future__ import annotations

import re

import pytest
import torch
from expecttest import assert_expected_inline
from inductor_cases import COMPILER, relative_difference
from pass_graphs import capture, program, run_pass
from torch._inductor.utils import run_and_get_code
from torch.fx import GraphModule

from gt_config.node_keys import PhaseAnnotation
from gt_passes import CompileWholeGraph
from gt_passes.compilation import inductor_compiler
from gt_passes.compilation.inductor_compiler import keep_saved_values
from gt_trace.node_metadata import write_annotation

X = torch.linspace(-1, 1, 64).reshape(8, 8)


def with_phases(graph_module: GraphModule, *backward: str) -> GraphModule:
    """Nodes of a hand-made graph, of which those named are of the backward."""
    for node in graph_module.graph.nodes:
        phase = "backward" if node.name in backward else "forward"
        write_annotation(node, PhaseAnnotation(phase=phase))
    return graph_module


def test_a_product_that_the_backward_reads_is_kept_in_place_of_its_operands():
    def step(x, w):
        y = torch.mm(x, w) * torch.mm(w, x)
        return y.sin(), y.cos()

    graph_module = with_phases(capture(step, X, X + 1), "cos")
    assert_expected_inline(
        program(keep_saved_values(graph_module)),
        """\
mm = aten.mm.default(x_1, w_1)
mm_1 = aten.mm.default(w_1, x_1)
mul = aten.mul.Tensor(mm, mm_1)
inductor_force_stride_order_default = prims.inductor_force_stride_order.default(mul, [8, 1])
sin = aten.sin.default(inductor_force_stride_order_default)
cos = aten.cos.default(inductor_force_stride_order_default)
return [sin, cos]
""",
    )
    assert "force_stride" not in program(graph_module)  # stays as it is


def test_what_takes_no_less_memory_than_its_operands_is_left_to_inductor():
    """One operand of the same size; operands that are inputs; one that the backward reads anyway."""

    def step(x, w):
        product, other = torch.mm(w, w), torch.mm(x, w)
        one = product.sin()
        of_inputs = x + w
        of_held = one * of_inputs + other
        return of_held, other.exp(), one.tan(), of_inputs.cos(), of_held.sin()

    graph_module = with_phases(capture(step, X, X + 1), "exp", "tan", "cos", "sin_1")
    assert keep_saved_values(graph_module) is graph_module


def test_complex_numbers_are_buffers_already():
    def step(x, w):
        y = torch.view_as_complex(torch.mm(x, w).view(8, 4, 2)) * torch.view_as_complex(
            torch.mm(w, x).view(8, 4, 2)
        )
        return torch.view_as_real(y).cos()

    graph_module = with_phases(capture(step, X, X + 1), "cos")
    assert keep_saved_values(graph_module) is graph_module


def test_without_a_backward_nothing_is_kept():
    graph_module = with_phases(
        capture(lambda x, w: (torch.mm(x, w) * torch.mm(w, x)).sin(), X, X + 1)
    )
    assert keep_saved_values(graph_module) is graph_module


@pytest.mark.slow  # compiles with Inductor
def test_a_compiled_program_holds_the_product_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def step(x, w, gradient):
        y = torch.mm(x, w) * torch.mm(w, x)
        loss = y.sum()
        return loss, torch.mm(gradient * loss, gradient) * y

    inputs = (X, X + 1, X - 1)
    held = {}
    for keeps in (True, False):
        if not keeps:
            monkeypatch.setattr(inductor_compiler, "keep_saved_values", lambda body: body)
        graph_module = with_phases(capture(step, *inputs), "mul_1", "mm_2", "mul_2")
        _, codes = run_and_get_code(run_pass, CompileWholeGraph(compiler=COMPILER), graph_module)
        for expected, got in zip(step(*inputs), graph_module(*inputs), strict=True):
            assert relative_difference(expected, got) <= 1e-5
        held[keeps] = buffers_held_at_the_last_product(codes[0])
    assert held == {True: 3, False: 4}


def buffers_held_at_the_last_product(code: str) -> int:
    """Buffers of 8 x 8 that a program of Inductor holds there, the product's included."""
    held: set[str] = set()
    at_products = []
    for line in code.splitlines():
        made = re.match(r"\s+(buf\d+) = empty_strided_cpu\(\(8, 8\)", line)
        reused = re.match(r"\s+(buf\d+) = (buf\d+)", line)
        if made:
            held.add(made[1])
        elif reused and reused[2] in held:
            held.add(reused[1])
        for name in re.findall(r"del (buf\d+)", line):
            held.discard(name)
        if "extern_kernels.mm(" in line:
            at_products.append(len(held))
    return at_products[-1]
