"""What operators have to do: FLOPs and bytes of captured nodes, against numbers by hand."""

from __future__ import annotations

import pytest
import torch
from pass_graphs import capture
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from gt_passes.simulation import MatmulShape, OpWork, SymbolSizes
from gt_passes.simulation.work import is_masked, work_of

aten = torch.ops.aten
BF16 = torch.bfloat16


def only(graph_module: GraphModule, target: object) -> Node:
    (found,) = graph_module.graph.find_nodes(op="call_function", target=target)
    return found


def work(graph_module: GraphModule, target: object) -> OpWork:
    return work_of(only(graph_module, target), SymbolSizes())


def test_a_matrix_product_counts_twice_its_multiply_adds_and_each_matrix_once():
    graph = capture(torch.mm, torch.ones(8, 16, dtype=BF16), torch.ones(16, 4, dtype=BF16))
    assert work(graph, aten.mm.default) == OpWork(
        kind="matmul",
        flops=2 * 8 * 16 * 4,
        matmul=MatmulShape(8, 4, 16),
        dtype=BF16,
        moved_bytes=2 * (8 * 16 + 16 * 4 + 8 * 4),
    )


def test_a_batched_product_counts_its_batch():
    graph = capture(torch.bmm, torch.ones(3, 8, 16), torch.ones(3, 16, 4))
    assert work(graph, aten.bmm.default).matmul == MatmulShape(8, 4, 16, 3)


def test_a_product_with_a_bias_reads_the_bias():
    graph = capture(torch.addmm, torch.ones(4), torch.ones(8, 16), torch.ones(16, 4))
    found = work(graph, aten.addmm.default)
    assert found.matmul == MatmulShape(8, 4, 16)
    assert found.moved_bytes == 4 * (4 + 8 * 16 + 16 * 4 + 8 * 4)


def test_a_matrix_and_itself_are_read_once():
    graph = capture(lambda x: x @ x, torch.ones(8, 8))
    assert work(graph, aten.mm.default).moved_bytes == 4 * 2 * 64


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((64, 16), (4, 16, 8), MatmulShape(16, 8, 16, 4)),  # rows belong to groups
        ((32, 64), (64, 8), MatmulShape(32, 8, 16, 4)),  # the inner dimension does
    ],
)
def test_a_grouped_product_is_one_product_a_group(a, b, expected):
    first = torch.ones(a, dtype=BF16)
    second = torch.ones(b, dtype=BF16)
    if second.ndim == 2:
        first = torch.ones(a[1], a[0], dtype=BF16).t()  # column-major, as its kernel asks
    offsets = torch.arange(1, 5, dtype=torch.int32) * 16

    def grouped(x, y, ends):
        return torch.ops.aten._grouped_mm.default(x, y, ends)

    graph = capture(grouped, first, second, offsets)
    found = work(graph, aten._grouped_mm.default)
    assert (found.kind, found.matmul) == ("grouped_matmul", expected)


def test_products_of_float8_are_products_at_the_rate_of_8_bits():
    def products(x, y, tokens, experts, ends):
        one, rows, groups = torch.ones(()), torch.ones(64), torch.ones(4, 16)
        aten._scaled_mm.default(x, y.t(), one, one, out_dtype=BF16)
        aten._scaled_grouped_mm.default(
            tokens, experts.transpose(-2, -1), rows, groups, ends, out_dtype=BF16
        )

    float8 = torch.float8_e4m3fn
    inputs = [torch.ones(shape).to(float8) for shape in ((16, 32), (48, 32), (64, 16), (4, 16, 16))]
    graph = capture(products, *inputs, torch.arange(1, 5, dtype=torch.int32) * 16)
    one = work(graph, aten._scaled_mm.default)
    assert (one.kind, one.matmul, one.dtype) == ("matmul", MatmulShape(16, 48, 32), float8)
    experts = work(graph, aten._scaled_grouped_mm.default)
    assert experts.kind == "grouped_matmul"
    assert (experts.matmul, experts.dtype) == (MatmulShape(16, 16, 16, 4), float8)


def test_a_convolution_agrees_with_the_flop_counter_of_torch():
    def convolve(x, w):
        return F.conv2d(x, w, stride=2, padding=1)

    x, w = torch.ones(2, 8, 16, 16), torch.ones(12, 8, 3, 3)
    counter = FlopCounterMode(display=False)
    with counter:
        convolve(x, w)
    found = work(capture(convolve, x, w), aten.convolution.default)
    assert found.flops == counter.get_total_flops()


def attention(**options: object) -> GraphModule:
    q, k = torch.ones(2, 4, 32, 16, dtype=BF16), torch.ones(2, 4, 32, 16, dtype=BF16)

    def attend(q, k, v):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, **options)[0]

    return capture(attend, q, k, k.clone())


def test_attention_counts_scores_and_values():
    graph = attention()
    found = work(graph, aten._scaled_dot_product_flash_attention_for_cpu.default)
    assert found.kind == "attention_forward"
    assert found.flops == 2 * (2 * 4 * 32 * 32) * (16 + 16)
    assert found.moved_bytes == 2 * 4 * (2 * 4 * 32 * 16)


def test_backward_of_attention_counts_five_products():
    graph = capture(
        lambda g, q, k, v, o, lse: (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                g, q, k, v, o, lse, 0.0, True
            )[0]
        ),
        *(torch.ones(2, 4, 32, 16) for _ in range(5)),
        torch.ones(2, 4, 32),
    )
    found = work(graph, aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
    assert found.kind == "attention_backward"
    assert found.flops == 2 * (2 * 4 * 32 * 32) * 5 * 16


def made_by_hand(target: object, *inputs: torch.Tensor, result: object, **kwargs: object) -> Node:
    """A node of a graph that this machine cannot capture."""
    graph = Graph()
    arguments = []
    for position, value in enumerate(inputs):
        arguments.append(graph.placeholder(f"x{position}"))
        arguments[-1].meta["val"] = value
    node = graph.call_function(target, tuple(arguments), kwargs)
    node.meta["val"] = result
    return node


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("operator", "kind", "products"),
    [
        (torch.ops.higher_order.flex_attention, "attention_forward", 256 + 128),
        (torch.ops.higher_order.flex_attention_backward, "attention_backward", 3 * 256 + 2 * 128),
    ],
)
def test_flex_attention_pads_widths_to_powers_of_two(operator, kind, products):
    q, k, v = meta(2, 4, 32, 192), meta(2, 4, 32, 192), meta(2, 4, 32, 128)
    node = made_by_hand(operator, q, k, v, result=(meta(2, 4, 32, 128),))
    found = work_of(node, SymbolSizes())
    assert (found.kind, found.flops) == (kind, 2 * (2 * 4 * 32 * 32) * products)
    assert is_masked(node)
    assert not found.is_guess


def test_a_copy_to_the_host_crosses_the_bus_and_blocks_unless_told_otherwise():
    on_host = torch.empty(64, dtype=BF16)
    target = aten._to_copy.default
    found = work_of(made_by_hand(target, meta(64), result=on_host), SymbolSizes())
    assert found == OpWork(kind="host_copy", moved_bytes=128, blocks_host=True)
    eager = made_by_hand(target, meta(64), result=on_host, non_blocking=True)
    assert not work_of(eager, SymbolSizes()).blocks_host
    back = made_by_hand(target, on_host, result=meta(64))
    assert work_of(back, SymbolSizes()) == OpWork(kind="host_copy", moved_bytes=128)


def test_the_backward_of_a_convolution_counts_both_gradients():
    def both(g, x, w):
        return torch.ops.aten.convolution_backward(
            g, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
        )[:2]

    g, x, w = torch.ones(2, 12, 16, 16), torch.ones(2, 8, 16, 16), torch.ones(12, 8, 3, 3)
    counter = FlopCounterMode(display=False)
    with counter:
        both(g, x, w)
    found = work(capture(both, g, x, w), aten.convolution_backward.default)
    assert found.flops == counter.get_total_flops()


def test_an_update_of_a_list_reads_and_writes_all_of_it():
    def scale(x, y):
        copies = [x.clone(), y.clone()]
        torch._foreach_mul_(copies, 2.0)
        return tuple(copies)

    graph = capture(scale, torch.ones(64), torch.ones(8))
    assert work(graph, aten._foreach_mul_.Scalar).moved_bytes == 2 * 4 * 72


def test_element_wise_operators_move_their_inputs_and_outputs():
    graph = capture(torch.add, torch.ones(64, 8), torch.ones(64, 8))
    assert work(graph, aten.add.Tensor) == OpWork(kind="streaming", moved_bytes=3 * 4 * 64 * 8)


def test_a_broadcast_dimension_is_read_once():
    graph = capture(lambda x, y: x + y.expand(64, 8), torch.ones(64, 8), torch.ones(1, 8))
    assert work(graph, aten.add.Tensor).moved_bytes == 4 * (2 * 64 * 8 + 8)


def test_an_update_in_place_reads_and_writes():
    graph = capture(lambda x, y: x.clone().add_(y), torch.ones(64), torch.ones(64))
    assert work(graph, aten.add_.Tensor).moved_bytes == 3 * 4 * 64


def test_filling_only_writes():
    graph = capture(lambda x: torch.zeros_like(x), torch.ones(64))
    assert work(graph, aten.zeros_like.default).moved_bytes == 4 * 64


def test_a_gather_reads_the_rows_that_it_is_asked_for():
    graph = capture(
        lambda rows, table: F.embedding(rows, table),
        torch.zeros(3, dtype=torch.int64),
        torch.ones(1000, 8),
    )
    target = aten.embedding.default
    # Of 1000 rows 3 are read and written; indices are 8 bytes.
    assert work(graph, target).kind == "irregular"
    assert work(graph, target).moved_bytes == 2 * 4 * 3 * 8 + 8 * 3


def test_views_and_allocations_launch_nothing():
    graph = capture(lambda x: x.new_empty(3).copy_(x.view(4, 2).t()[0, :3]), torch.ones(8))
    assert work(graph, aten.t.default).kind == "view"
    assert work(graph, aten.new_empty.default).kind == "view"


def test_reading_a_number_blocks_the_host():
    def read(x):
        return torch.ones(x.sum().item())

    graph = make_fx(read, tracing_mode="symbolic")(torch.ones(4, dtype=torch.int64))
    found = work(graph, aten._local_scalar_dense.default)
    assert (found.kind, found.blocks_host) == ("host_scalar", True)


def test_a_custom_operator_is_priced_by_its_bytes_and_says_so():
    with torch.library._scoped_library("gt_simulation_test", "DEF") as library:
        library.define("mystery(Tensor x) -> Tensor")
        library.impl("mystery", lambda x: x.clone(), "CompositeExplicitAutograd")
        target = torch.ops.gt_simulation_test.mystery.default
        graph = capture(lambda x: target(x), torch.ones(8))
        found = work(graph, target)
        assert (found.moved_bytes, found.is_guess) == (2 * 4 * 8, True)

        def rule(node, sizes):
            return OpWork(kind="streaming", moved_bytes=1)

        known = work_of(only(graph, target), SymbolSizes(), {target: rule})
        assert known == OpWork(kind="streaming", moved_bytes=1)


def test_an_operator_of_torch_that_bytes_do_not_describe_says_so():
    graph = capture(lambda x: torch.linalg.cholesky(x), torch.eye(4))
    assert work(graph, aten.linalg_cholesky_ex.default).is_guess
