"""The verifier finds bugs seeded into a graph, and nothing in graphs that are right."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from pass_graphs import capture, collectives, node_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from gt_passes import Verifier
from gt_passes.analysis.symbol_bindings import bind_symbols_anew
from gt_passes.errors import GraphInputError
from gt_passes.verifier.verifier import GraphInterface

aten = torch.ops.aten
X = torch.ones(4, 6)


def gathered_product() -> GraphModule:
    """
    x ── all-gather ── wait ─┬────── mm ── relu ── view
                             └─ t ───┘
    """

    def step(x):
        whole = collectives.wait_tensor(collectives.all_gather_into_tensor(x, 2, "fsdp"))
        return (whole @ whole.t()).relu().view(2, 32)

    return capture(step, X)


def problems(graph_module: GraphModule, interface: GraphInterface | None = None) -> str:
    report = Verifier().verify(graph_module, interface=interface)
    return "\n".join(map(str, report.problems))


def fake(node: Node, **changes: object) -> torch.Tensor:
    """A fake value like that of a node, but for what is given."""
    value = node.meta["val"]
    given = {
        "size": tuple(value.shape),
        "stride": value.stride(),
        "dtype": value.dtype,
        "device": value.device,
        **changes,
    }
    with value.fake_mode:
        return torch.empty_strided(
            given["size"], given["stride"], dtype=given["dtype"], device=given["device"]
        )


def test_finds_nothing_in_a_graph_as_captured():
    report = Verifier().verify(gathered_product())
    assert report.problems == ()
    assert report.unverified == ()


def _rename_parameter(graph_module: GraphModule) -> None:
    node = next(iter(graph_module.graph.find_nodes(op="placeholder")))
    node.target = "x=print()"


def _rename_output(graph_module: GraphModule) -> None:
    graph_module.graph.output_node().target = "output; print()"


def _add_keyword(graph_module: GraphModule) -> None:
    node_of(graph_module, "relu").kwargs = {"x=print(), y": 1}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_rename_parameter, "its target is 'x=print()', which is no name that a parameter"),
        (_rename_output, "its target is 'output; print()', which is no name that an output has"),
        (_add_keyword, "a keyword argument named 'x=print(), y', which is no parameter of aten."),
    ],
)
def test_finds_text_that_would_be_code(edit: Callable[[GraphModule], None], message: str):
    graph_module = gathered_product()
    verifier = Verifier()
    before = verifier.scan(graph_module)
    interface = GraphInterface.of(graph_module)

    edit(graph_module)

    assert message in problems(graph_module)
    after = verifier.scan(graph_module, before=before)
    found = verifier.find_new_problems(before, after, interface=interface)
    assert message in "\n".join(map(str, found))


def test_finds_a_stale_shape():
    graph_module = gathered_product()
    relu = node_of(graph_module, "relu")
    relu.meta["val"] = fake(relu, size=(8, 4), stride=(4, 1))
    assert_expected_inline(
        problems(graph_module),
        """\
[fake re-propagation] node relu (aten.relu.default)
its recorded fake value is not what its operator gives on its inputs
expected shape [8, 8], stride [8, 1], dtype torch.float32, device cpu
got      shape [8, 4], stride [4, 1], dtype torch.float32, device cpu
[fake re-propagation] node view (aten.view.default)
its operator refuses the recorded values of its inputs: RuntimeError: shape '[2, 32]' is invalid for input of size 32""",
    )


def test_finds_a_wrong_dtype():
    graph_module = gathered_product()
    relu = node_of(graph_module, "relu")
    relu.meta["val"] = fake(relu, dtype=torch.bfloat16)
    assert_expected_inline(
        problems(graph_module),
        """\
[fake re-propagation] node relu (aten.relu.default)
its recorded fake value is not what its operator gives on its inputs
expected shape [8, 8], stride [8, 1], dtype torch.float32, device cpu
got      shape [8, 8], stride [8, 1], dtype torch.bfloat16, device cpu
[fake re-propagation] node view (aten.view.default)
its recorded fake value is not what its operator gives on its inputs
expected shape [2, 32], stride [32, 1], dtype torch.bfloat16, device cpu
got      shape [2, 32], stride [32, 1], dtype torch.float32, device cpu""",
    )


def test_finds_a_wrong_stride():
    graph_module = gathered_product()
    transposed = node_of(graph_module, "t")
    transposed.meta["val"] = fake(transposed, stride=(8, 1))
    assert_expected_inline(
        problems(graph_module),
        """\
[fake re-propagation] node t (aten.t.default)
its recorded fake value is not what its operator gives on its inputs
expected shape [6, 8], stride [1, 6], dtype torch.float32, device cpu
got      shape [6, 8], stride [8, 1], dtype torch.float32, device cpu""",
    )


def test_finds_a_wrong_device():
    graph_module = gathered_product()
    relu = node_of(graph_module, "relu")
    relu.meta["val"] = fake(relu, device="meta")
    assert "expected shape [8, 8], stride [8, 1], dtype torch.float32, device cpu\n" in problems(
        graph_module
    )


def test_finds_a_wrong_storage_offset():
    graph_module = capture(lambda x: x[1:].cos(), X)
    part = node_of(graph_module, "slice_1")
    part.meta["val"] = fake(part)
    assert "storage offset 6" in problems(graph_module)


def test_finds_a_missing_value():
    graph_module = gathered_product()
    del node_of(graph_module, "relu").meta["val"]
    text, _, what_torch_says = problems(graph_module).rpartition(": RuntimeError: ")
    assert what_torch_says
    assert_expected_inline(
        text,
        """\
[fake re-propagation] node relu (aten.relu.default)
it has no fake value in node.meta["val"]; gt_passes.call_like adds calls that have one
expected shape [8, 8], stride [8, 1], dtype torch.float32, device cpu
[fake re-propagation] node view (aten.view.default)
its operator cannot be run without a value of relu""",
    )


def test_what_else_is_wrong_with_a_call_on_a_missing_value_is_told():
    graph_module = gathered_product()
    del node_of(graph_module, "relu").meta["val"]
    node_of(graph_module, "view").kwargs = {"depth": 3}
    (*_, refusal) = problems(graph_module).splitlines()
    assert refusal.startswith("its operator cannot be run without a value of relu: RuntimeError: ")
    assert "at most 2 argument" in refusal


def flash_attention() -> GraphModule:
    """As a GPU attends; two of its nine results are lengths."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention.default
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 2, 8, 16, dtype=torch.bfloat16) for _ in range(3))
        return make_fx(lambda *qkv: attend(*qkv, 0.0, True)[0])(q, k, v)


def test_numbers_that_nobody_reads_need_no_value():
    graph_module = flash_attention()
    lengths = [node for node in graph_module.graph.nodes if node.meta.get("val", None) is None]
    assert [node.args[1] for node in lengths if node.target is operator.getitem] == [2, 3, 4, 5]
    assert problems(graph_module) == ""


def test_a_number_that_is_read_needs_one():
    graph_module = flash_attention()
    (length,) = (
        node
        for node in graph_module.graph.nodes
        if node.target is operator.getitem and node.args[1] == 4
    )
    with graph_module.graph.inserting_after(length):
        longer = graph_module.graph.call_function(operator.add, (length, 1))
    longer.meta["val"] = 9
    assert "node getitem_4" in problems(graph_module)


def test_a_number_that_a_pass_lets_be_read_needs_one():
    def step(x, *qkv):
        attend = aten._scaled_dot_product_flash_attention.default
        return attend(*qkv, 0.0, True)[0], aten.slice.Tensor(x, 0, 0, 12)

    with FakeTensorMode():
        qkv = [torch.empty(1, 2, 8, 16, dtype=torch.bfloat16) for _ in range(3)]
        graph_module = make_fx(step)(torch.empty(12, 4), *qkv)
    verifier = Verifier()
    before = verifier.scan(graph_module)
    interface = GraphInterface.of(graph_module)
    assert verifier.verify(graph_module, interface=interface, scan=before).problems == ()
    (length,) = (
        node
        for node in graph_module.graph.nodes
        if node.target is operator.getitem and node.args[1] == 4
    )
    part = node_of(graph_module, "slice_1")
    part.args = (*part.args[:3], length)  # 8 of 12, where no value is read as all of them
    after = verifier.scan(graph_module, before=before)
    found = verifier.find_new_problems(before, after, interface=interface)
    assert "node getitem_4" in "\n".join(map(str, found))


def test_finds_a_tuple_that_lost_an_item():
    graph_module = capture(lambda x: x.max(dim=0)[0], X)
    maximum = node_of(graph_module, "max_1")
    maximum.meta["val"] = maximum.meta["val"][:1]
    assert "got      (shape [6], stride [1], dtype torch.float32, device cpu)" in problems(
        graph_module
    )


def test_finds_an_operator_that_refuses_its_inputs():
    graph_module = gathered_product()
    mm = node_of(graph_module, "mm")
    mm.update_arg(1, node_of(graph_module, "wait_tensor"))
    assert_expected_inline(
        problems(graph_module),
        """\
[fake re-propagation] node mm (aten.mm.default)
its operator refuses the recorded values of its inputs: RuntimeError: a and b must have same reduction dim, but got [8, 6] X [8, 6].""",
    )


def test_finds_a_rewired_input():
    graph_module = gathered_product()
    node_of(graph_module, "relu").update_arg(0, node_of(graph_module, "t"))
    assert "node relu" in problems(graph_module)


def test_finds_a_use_before_the_definition():
    graph_module = gathered_product()
    node_of(graph_module, "mm").append(node_of(graph_module, "wait_tensor"))
    assert_expected_inline(
        problems(graph_module),
        """\
[well-formed] the graph
Argument 'wait_tensor' of Node 't' was used before it has been defined! Please check that Nodes in the graph are topologically ordered""",
    )


def test_finds_a_dropped_wait():
    graph_module = gathered_product()
    wait = node_of(graph_module, "wait_tensor")
    wait.replace_all_uses_with(wait.args[0])
    graph_module.graph.erase_node(wait)
    assert_expected_inline(
        problems(graph_module),
        """\
[collective waits] node all_gather_into_tensor (_c10d_functional.all_gather_into_tensor.default)
the result of this collective is never waited for
expected wait_tensor(all_gather_into_tensor)
got      none
[collective waits] node t (aten.t.default)
it reads all_gather_into_tensor, the result of a collective, unwaited
expected a use of wait_tensor(all_gather_into_tensor)
got      a use of all_gather_into_tensor itself
[collective waits] node mm (aten.mm.default)
it reads all_gather_into_tensor, the result of a collective, unwaited
expected a use of wait_tensor(all_gather_into_tensor)
got      a use of all_gather_into_tensor itself""",
    )


def test_finds_a_use_before_the_wait():
    graph_module = gathered_product()
    node_of(graph_module, "mm").update_arg(0, node_of(graph_module, "all_gather_into_tensor"))
    assert_expected_inline(
        problems(graph_module),
        """\
[collective waits] node mm (aten.mm.default)
it reads all_gather_into_tensor, the result of a collective, unwaited
expected a use of wait_tensor(all_gather_into_tensor)
got      a use of all_gather_into_tensor itself""",
    )


def test_finds_an_output_that_is_not_waited_for():
    graph_module = gathered_product()
    (output,) = graph_module.graph.find_nodes(op="output")
    output.args = (node_of(graph_module, "all_gather_into_tensor"),)
    assert "node output (output)\nit reads all_gather_into_tensor" in problems(graph_module)


def test_finds_an_item_of_a_coalesced_collective_that_is_not_waited_for():
    def step(x):
        first, second = collectives.all_reduce_coalesced([x, x], "sum", "dp")
        return collectives.wait_tensor(first), collectives.wait_tensor(second)

    graph_module = capture(step, X)
    assert problems(graph_module) == ""
    wait = node_of(graph_module, "wait_tensor_1")
    wait.replace_all_uses_with(wait.args[0])
    assert "it reads getitem_1, the result of a collective, unwaited" in problems(graph_module)


def test_finds_an_operator_without_an_output_node_at_the_end():
    graph_module = gathered_product()
    (output,) = graph_module.graph.find_nodes(op="output")
    output.append(graph_module.graph.call_function(aten.rand.default, ([2],)))
    assert "[well-formed] the graph\na graph ends with its one output" in problems(graph_module)


def test_finds_a_placeholder_after_a_computation():
    graph_module = gathered_product()
    node_of(graph_module, "t").append(node_of(graph_module, "x_1"))
    assert "this placeholder stands after all_gather_into_tensor" in problems(graph_module)


def test_finds_a_node_of_another_graph():
    graph_module, other = gathered_product(), gathered_product()
    node_of(graph_module, "relu").update_arg(0, node_of(other, "mm"))
    assert "does not belong to this Graph" in problems(graph_module)


def change_input(graph_module: GraphModule) -> None:
    placeholder = node_of(graph_module, "x_1")
    placeholder.meta["val"] = fake(placeholder, dtype=torch.float64)


def drop_output(graph_module: GraphModule) -> None:
    (output,) = graph_module.graph.find_nodes(op="output")
    output.args = ((),)


def add_input(graph_module: GraphModule) -> None:
    with graph_module.graph.inserting_before(node_of(graph_module, "x_1")):
        graph_module.graph.placeholder("y")


def change_output(graph_module: GraphModule) -> None:
    (output,) = graph_module.graph.find_nodes(op="output")
    output.args = (node_of(graph_module, "relu"),)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (change_input, "input 0 changed"),
        (add_input, "the number of inputs changed\nexpected 1\ngot      2"),
        (change_output, "output 0 changed"),
        (drop_output, "the number of outputs changed\nexpected 1\ngot      0"),
    ],
)
def test_finds_a_changed_interface(change: Callable[[GraphModule], None], found: str):
    graph_module = gathered_product()
    interface = GraphInterface.of(graph_module)
    assert problems(graph_module, interface) == ""
    change(graph_module)
    assert f"[inputs and outputs] the graph\n{found}" in problems(graph_module, interface)


def test_remembered_answers_do_not_hide_a_later_bug():
    verifier = Verifier()
    assert not verifier.verify(gathered_product()).problems
    graph_module = gathered_product()
    relu = node_of(graph_module, "relu")
    relu.meta["val"] = fake(relu, dtype=torch.bfloat16)
    assert len(verifier.verify(graph_module).problems) == 2  # relu, and the view of it


def test_tells_arguments_apart_that_are_equal_in_python():
    def step(x):
        return x.add(1), x.add(1.0), x.add(True)

    graph_module = capture(step, torch.ones(3, dtype=torch.int64))
    assert problems(graph_module) == ""
    node_of(graph_module, "add_1").update_arg(1, 1)
    assert "node add_1" in problems(graph_module)


def test_leaves_the_graph_and_its_values_as_they_were():
    def step(x):
        y = x.clone()
        y.unsqueeze_(0)
        y.t_() if y.dim() == 2 else y.squeeze_(0)
        return y.add_(1)

    graph_module = capture(step, X)
    values = {node: node.meta.get("val") for node in graph_module.graph.nodes}
    shapes = {node: getattr(value, "shape", None) for node, value in values.items()}
    code = graph_module.code
    assert problems(graph_module) == ""
    assert problems(graph_module) == ""
    for node in graph_module.graph.nodes:
        assert node.meta.get("val") is values[node]
        assert getattr(values[node], "shape", None) == shapes[node]
    assert graph_module.code == code


def test_accepts_data_dependent_sizes_and_finds_wrong_ones():
    def step(x, splits):
        sizes = splits.tolist()
        for size in sizes:
            torch._check(size >= 0)
        exchanged = collectives.wait_tensor(collectives.all_to_all_single(x, sizes, sizes, "ep"))
        rows = x.nonzero()
        return exchanged.sum(), rows.sum(), torch.zeros(rows.shape[0], 3)

    graph_module = capture(step, X, torch.tensor([2, 2]))
    assert problems(graph_module) == ""
    nonzero = node_of(graph_module, "nonzero")
    zeros = node_of(graph_module, "zeros")
    zeros.meta["val"] = fake(zeros, dtype=torch.float64)
    assert "node zeros" in problems(graph_module)
    zeros.meta["val"] = nonzero.meta["val"]
    assert "expected shape [u" in problems(graph_module)


def test_finds_a_size_that_two_nodes_find_out():
    """As a pass leaves it that copies the metadata of a node: each result has its own symbol."""

    def step(splits, others):
        return torch.zeros(splits.sum().item(), 2), torch.zeros(others.sum().item(), 2)

    graph_module = capture(step, torch.tensor([2, 2]), torch.tensor([1, 2]))
    assert problems(graph_module) == ""
    first, second = (n for n in graph_module.graph.nodes if "local_scalar" in n.name)
    second.meta["unbacked_bindings"] = first.meta["unbacked_bindings"]
    assert_expected_inline(
        problems(graph_module),
        """\
[fake re-propagation] node _local_scalar_dense_1 (aten._local_scalar_dense.default)
it says that its result is u0, as _local_scalar_dense does: a compiler would take both for one number""",
    )
    bind_symbols_anew(second)
    assert problems(graph_module) == ""


def test_accepts_symbolic_sizes_without_adding_guards():
    graph_module = make_fx(lambda x: (x.view(-1) * 2).view(x.shape), tracing_mode="symbolic")(X)
    shape_env = graph_module.shape_env
    guards = len(shape_env.guards)
    assert problems(graph_module) == ""
    assert len(shape_env.guards) == guards


def test_accepts_higher_order_operators():
    from torch._higher_order_ops.flex_attention import flex_attention
    from torch.nn.attention.flex_attention import create_block_mask

    def step(q):
        mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 128, 128, device="cpu")
        return flex_attention(q, q, q, lambda s, b, h, i, j: s, mask.as_tuple(), 1.0, {})

    graph_module = capture(step, torch.ones(1, 1, 128, 16))
    assert problems(graph_module) == ""
    (attention,) = [n for n in graph_module.graph.nodes if str(n.target) == "flex_attention"]
    attention.meta["val"] = attention.meta["val"][:1]
    assert "node flex_attention" in problems(graph_module)


def test_names_operators_that_cannot_be_run_on_fake_values():
    with torch.library._scoped_library("gt_passes_test", "DEF") as library:
        library.define("opaque(Tensor x) -> Tensor")
        library.impl("opaque", lambda x: x.clone(), "CPU")
        graph_module = capture(lambda x: x.cos().sin(), X)
        node_of(graph_module, "cos").target = torch.ops.gt_passes_test.opaque.default
        report = Verifier().verify(graph_module)
    assert report.problems == ()
    assert [(node.node_name, node.target) for node in report.unverified] == [
        ("cos", "gt_passes_test.opaque.default")
    ]
    assert report.unverified[0].reason


def test_ambient_autocast_changes_nothing():
    graph_module = gathered_product()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert problems(graph_module) == ""


def test_refuses_a_graph_without_fake_values():
    graph_module = torch.fx.symbolic_trace(torch.nn.Linear(2, 2))
    with pytest.raises(GraphInputError) as error:
        Verifier().verify(graph_module)
    assert_expected_inline(
        str(error.value),
        """no node has a fake tensor in node.meta["val"]: trace with fake tensors (make_fx(..., tracing_mode="fake"))""",
    )
