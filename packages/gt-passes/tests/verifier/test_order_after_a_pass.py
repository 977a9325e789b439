"""After a pass: waits, races, writes, unknown operators, groups, and what may be removed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator

import pytest
import torch
from edited_graphs import (
    Edit,
    EditGraph,
    ReplaceOperators,
    X,
    aten,
    call_after,
    move,
    problems_of,
    updated_buffer,
)
from expecttest import assert_expected_inline
from pass_graphs import capture, collectives, node_of, run_pass
from torch.fx import GraphModule, Node

from gt_passes import (
    ChangeBounds,
    PassContext,
    PassManager,
    VerificationError,
)
from gt_passes.analysis.outlined_region import OutlinedRegion, RegionOutliner

FREELY = ChangeBounds(peak_memory_growth=None)

# Waits


def reduced() -> GraphModule:
    def step(x):
        return collectives.wait_tensor(collectives.all_reduce(x, "sum", "dp")).cos()

    return capture(step, X)


def wait_again(edited: GraphModule) -> None:
    wait = node_of(edited, "wait_tensor")
    again = call_after(edited, wait, collectives.wait_tensor.default, wait.args[0])
    node_of(edited, "cos").update_arg(0, again)


def test_a_second_wait_is_found():
    assert_expected_inline(
        problems_of(reduced(), wait_again),
        """\
[collective waits] node wait_tensor (_c10d_functional.wait_tensor.default)
it is not the only wait for this collective
expected one wait for all_reduce
got      several
[collective waits] node wait_tensor_default (_c10d_functional.wait_tensor.default)
it is not the only wait for this collective
expected one wait for all_reduce
got      several""",
    )


def test_a_wait_for_what_was_waited_for_is_found():
    def wait_for_wait(edited: GraphModule) -> None:
        wait = node_of(edited, "wait_tensor")
        again = call_after(edited, wait, collectives.wait_tensor.default, wait)
        node_of(edited, "cos").update_arg(0, again)

    assert "one wait for wait_tensor" in problems_of(reduced(), wait_for_wait)


def test_waits_that_the_program_repeats_itself_are_its_own_affair():
    def step(x):
        launched = collectives.all_reduce(x, "sum", "dp")
        return collectives.wait_tensor(launched).cos(), collectives.wait_tensor(launched).sin()

    graph_module = capture(step, X)
    assert problems_of(graph_module, lambda edited: None) == ""

    def reverse(edited: GraphModule) -> None:
        node_of(edited, "all_reduce").append(node_of(edited, "wait_tensor_1"))

    assert problems_of(graph_module, reverse) == ""
    assert "it is not the only wait" in problems_of(graph_module, wait_again)


# Races with a collective in flight


def test_a_write_to_what_a_collective_still_reads_is_found():
    def step(x):
        shard = x.cos()
        gathered = collectives.wait_tensor(collectives.all_gather_into_tensor(shard, 2, "fsdp"))
        return gathered, shard.add_(1)

    graph_module = capture(step, X)
    assert problems_of(graph_module, lambda edited: None) == ""
    assert_expected_inline(
        problems_of(graph_module, move("wait_tensor", after="add_")),
        """\
[collective waits] node add_ (aten.add_.Tensor)
it touches the memory of cos while the collective all_gather_into_tensor is in flight
expected to stand before all_gather_into_tensor or after its wait
got      to stand between them""",
    )


def test_a_read_of_the_buffer_that_a_collective_fills_is_found():
    def step(x, y):
        buffer = x.new_empty(8, 6)
        launched = collectives.all_gather_into_tensor_out(x, 2, "fsdp", out=buffer)
        return collectives.wait_tensor(launched), y.sin()

    graph_module = capture(step, X, torch.ones(8, 6))
    assert problems_of(graph_module, lambda edited: None) == ""

    def read_early(edited: GraphModule) -> None:
        sin = node_of(edited, "sin")
        sin.update_arg(0, node_of(edited, "new_empty"))
        node_of(edited, "all_gather_into_tensor_out").append(sin)

    assert "node sin (aten.sin.default)\nit touches the memory of new_empty" in problems_of(
        graph_module, read_early
    )


# Order of memory, where the dataflow may change


def test_a_read_that_moved_across_a_write_is_found():
    graph_module = capture(updated_buffer, X, X.clone())
    assert_expected_inline(
        problems_of(graph_module, move("cos", after="copy_")),
        """\
[memory order] node cos (aten.cos.default)
between buffer_1 and its use here, its memory is written to in another way than before
expected no write
got      1 write, by copy_""",
    )


def test_a_dropped_write_is_found():
    def drop(edited: GraphModule) -> None:
        mul = node_of(edited, "mul_")
        mul.replace_all_uses_with(mul.args[0])
        edited.graph.erase_node(mul)

    assert_expected_inline(
        problems_of(capture(updated_buffer, X, X.clone()), drop),
        """\
[memory order] node mul_ (aten.mul_.Tensor)
it writes to memory, and is gone
expected the node itself, or a new one of the same operator
got      neither
[memory order] node buffer_1
the memory of this input is written to in another way than before
expected 2 writes, by copy_ to mul_
got      1 write, by copy_""",
    )


def test_a_new_write_over_a_value_that_is_still_read_is_found():
    def step(x):
        y = x.cos()
        return y.sin(), y.exp()

    def reuse_memory(edited: GraphModule) -> None:
        node_of(edited, "sin").target = aten.sin_.default

    assert_expected_inline(
        problems_of(capture(step, X), reuse_memory),
        """\
[memory order] node exp (aten.exp.default)
between cos and its use here, its memory is written to in another way than before
expected no write
got      1 write, by sin""",
    )
    assert problems_of(capture(lambda x: x.cos().sin(), X), reuse_memory) == ""


def test_a_pass_may_fill_a_buffer_of_its_own():
    def through_a_buffer(edited: GraphModule) -> None:
        cos = node_of(edited, "cos")
        empty = call_after(edited, cos, aten.empty_like.default, cos)
        view = call_after(edited, empty, aten.view.default, empty, [4, 6])
        copied = call_after(edited, view, aten.copy_.default, view, cos)
        copied.meta["val"] = view.meta["val"]
        node_of(edited, "sin").update_arg(0, empty)

    assert problems_of(capture(lambda x: x.cos().sin(), X), through_a_buffer) == ""


# Unknown operators


@pytest.fixture
def logged() -> Iterator[Callable[[], GraphModule]]:
    with torch.library._scoped_library("gt_passes_test", "DEF") as library:
        library.define("log(Tensor x) -> Tensor")
        library.impl("log", lambda x: x.clone(), "CPU")
        library.impl("log", lambda x: torch.empty_like(x), "Meta")

        def step(x):
            summed = collectives.wait_tensor(collectives.all_reduce(x, "sum", "dp"))
            seen = torch.ops.gt_passes_test.log(x)
            return summed.cos(), seen, x.sin()

        yield lambda: capture(step, X)


def test_nothing_moves_across_an_unknown_operator(logged: Callable[[], GraphModule]):
    assert problems_of(logged(), lambda edited: None) == ""
    assert problems_of(logged(), move("sin", after="log")) == ""
    assert_expected_inline(
        problems_of(
            logged(), lambda edited: node_of(edited, "log").prepend(node_of(edited, "sin"))
        ),
        """\
[barriers] node sin (aten.sin.default)
it moved across log, of which not all effects are known
expected to run after log
got      it runs before log""",
    )
    late_wait = problems_of(logged(), move("wait_tensor", after="log"))
    assert (
        "it moved across log, of which not all effects are known\nexpected to run before log"
        in (late_wait)
    )


def test_a_collective_made_anew_across_an_unknown_operator_is_found(
    logged: Callable[[], GraphModule],
):
    def make_anew(edited: GraphModule) -> None:
        launch, wait = node_of(edited, "all_reduce"), node_of(edited, "wait_tensor")
        new_launch = call_after(edited, node_of(edited, "log"), launch.target, *launch.args)
        new_wait = call_after(edited, new_launch, wait.target, new_launch)
        wait.replace_all_uses_with(new_wait)
        edited.graph.erase_node(wait)
        edited.graph.erase_node(launch)

    assert_expected_inline(
        problems_of(logged(), make_anew),
        """\
[declared bounds] the graph
replace-operators took bytes from all_reduce over group 'dp', of the part of the graph up to log
expected at least 96 bytes
got      0 bytes""",
    )


# Bytes by group


def test_bytes_may_not_go_from_one_group_to_another():
    def regroup(edited: GraphModule) -> None:
        node_of(edited, "all_reduce").update_arg(2, "tp")

    assert_expected_inline(
        problems_of(reduced(), regroup),
        """\
[declared bounds] the graph
replace-operators took bytes from all_reduce over group 'dp'
expected at least 96 bytes
got      0 bytes""",
    )
    freely = ChangeBounds(collective_bytes_may_shrink=True, peak_memory_growth=None)
    assert problems_of(reduced(), regroup, allowed=freely) == ""


def test_a_group_of_the_same_ranks_may_be_used_instead():
    graph_module = reduced()
    context = PassContext(
        fake_mode=PassContext.from_graph(graph_module).fake_mode, same_groups={"dp 2": "dp"}
    )

    def regroup(edited: GraphModule) -> None:
        node_of(edited, "all_reduce").update_arg(2, "dp 2")

    PassManager([ReplaceOperators(edit=regroup)], context=context).run(graph_module)


ONLY_REMOVES = ChangeBounds(only_removes=True, collective_bytes_may_shrink=True)


def test_a_pass_that_only_removes_may_do_nothing_else():
    def two_ends() -> GraphModule:
        graph_module = capture(lambda x: (x.cos() * x.sin(), x.exp()), X)
        graph_module.graph.find_nodes(op="output")[0].args = (node_of(graph_module, "mul"),)
        return graph_module

    def remove(graph_module: GraphModule) -> None:
        graph_module.graph.erase_node(node_of(graph_module, "exp"))

    def change(graph_module: GraphModule) -> None:
        mul = node_of(graph_module, "mul")
        mul.args = (mul.args[1], mul.args[0])

    def move(graph_module: GraphModule) -> None:
        node_of(graph_module, "cos").prepend(node_of(graph_module, "sin"))

    def add(graph_module: GraphModule) -> None:
        mul = node_of(graph_module, "mul")
        with graph_module.graph.inserting_after(mul):
            graph_module.graph.call_function(aten.cos.default, (mul,)).meta["val"] = mul.meta["val"]

    assert problems_of(two_ends(), remove, allowed=ONLY_REMOVES) == ""
    said = [problems_of(two_ends(), edit, allowed=ONLY_REMOVES) for edit in (change, move, add)]
    assert all("replace-operators declares that it only removes nodes" in text for text in said)
    assert ["node mul" in said[0], "node cos" in said[1], "cos" in said[2]] == [True] * 3
    assert ["changed node" in said[0], "moved node" in said[1], "new node" in said[2]] == [True] * 3


def test_peak_memory_of_a_pass_that_only_removes_is_not_estimated():
    graph_module = capture(lambda x: x.cos(), X)
    edit = ReplaceOperators(edit=lambda graph_module: None, allowed=ONLY_REMOVES)
    manager = PassManager([edit], context=PassContext.from_graph(graph_module))
    (record,) = manager.run(graph_module).records
    assert record.before.peak_memory_bytes is None


# New constants, calls and regions: the rest of the graph is checked all the same


def unrelated(x: torch.Tensor) -> torch.Tensor:
    """A callee of which the verifier knows nothing."""
    return x.clone()


def _call_python(edited: GraphModule) -> None:
    value = node_of(edited, "sin")
    call = call_after(edited, value, unrelated, value)
    value.replace_all_uses_with(call, delete_user_cb=lambda user: user is not call)


def _add_constant(edited: GraphModule) -> None:
    edited.register_buffer("one", torch.ones(4, 6))
    sin = node_of(edited, "sin")
    with edited.graph.inserting_before(sin):
        constant = edited.graph.get_attr("one")
    constant.meta["val"] = sin.meta["val"]
    call = call_after(edited, sin, aten.mul.Tensor, sin, constant)
    sin.replace_all_uses_with(call, delete_user_cb=lambda user: user is not call)


def _read_late(edited: GraphModule) -> None:
    node_of(edited, "copy_").append(node_of(edited, "cos"))


def _write_early(edited: GraphModule) -> None:
    node_of(edited, "cos").prepend(node_of(edited, "copy_"))


def _drop_write(edited: GraphModule) -> None:
    mul = node_of(edited, "mul_")
    mul.replace_all_uses_with(mul.args[0])
    edited.graph.erase_node(mul)


def _swap_writes(edited: GraphModule) -> None:
    buffer, copied, mul = (node_of(edited, name) for name in ("buffer_1", "copy_", "mul_"))
    mul.args, copied.args = (buffer, 2), (mul, copied.args[1])
    copied.prepend(mul)
    node_of(edited, "sin").update_arg(0, copied)


@pytest.mark.parametrize("add", [_call_python, _add_constant])
@pytest.mark.parametrize("edit", [_read_late, _write_early, _drop_write, _swap_writes])
def test_a_new_call_or_constant_does_not_end_the_check_of_memory(add: Edit, edit: Edit):
    def both(edited: GraphModule) -> None:
        add(edited)
        edit(edited)

    assert problems_of(capture(updated_buffer, X, X.clone()), add) == ""
    assert "[memory order]" in problems_of(capture(updated_buffer, X, X.clone()), both)


def test_a_new_call_without_a_schema_may_write_to_what_is_read_later():
    def call_early(edited: GraphModule) -> None:
        cos = node_of(edited, "cos")
        cos.update_arg(0, call_after(edited, node_of(edited, "x_1"), unrelated, cos.args[0]))

    assert_expected_inline(
        problems_of(capture(lambda x: (x.cos(), x.sin()), X), call_early),
        """\
[memory order] node sin (aten.sin.default)
between x_1 and its use here, its memory is written to in another way than before
expected no write
got      1 write, by unrelated, which no schema describes: register it with torch.library.custom_op
[memory order] node x_1
the memory of this input is written to in another way than before
expected no write
got      1 write, by unrelated, which no schema describes: register it with torch.library.custom_op""",
    )


def getitem(values: object, index: int) -> object:
    """A callee with the name of another one."""
    return values[1 - index]


def sym_max(x: torch.Tensor) -> torch.Tensor:
    """Likewise."""
    return x.zero_()


@pytest.mark.parametrize("callee", [operator.iadd, operator.imul, sym_max, torch.Tensor.zero_])
@pytest.mark.parametrize("graph_pass", [EditGraph, ReplaceOperators])
def test_a_function_that_writes_is_found(callee: Callable[..., object], graph_pass: type):
    def write(edited: GraphModule) -> None:
        cos = node_of(edited, "cos")
        more = (2.0,) if callee in (operator.iadd, operator.imul) else ()
        call_after(edited, cos, callee, cos.args[0], *more)

    graph_module = capture(lambda x: (x.cos(), x.sin()), X)
    with pytest.raises(VerificationError):
        run_pass(graph_pass(edit=write, allowed=FREELY), graph_module)


def test_a_function_with_the_name_of_another_one_is_found():
    def call_another(edited: GraphModule) -> None:
        for item in node_of(edited, "aminmax").users:
            item.target = getitem

    graph_module = capture(lambda x: tuple(torch.aminmax(x)), X)
    with pytest.raises(VerificationError):
        run_pass(EditGraph(edit=call_another, allowed=FREELY), graph_module)


def _written_constant(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    early = _CONSTANT.cos()
    _CONSTANT.add_(x)
    return early, _CONSTANT.sin()


_CONSTANT = torch.ones(4, 6)


def _read_constant_late(edited: GraphModule) -> None:
    """The constant's node moves too, so that no write stands between it and its reader."""
    cos = node_of(edited, "cos")
    with edited.graph.inserting_after(node_of(edited, "add_")):
        again = edited.graph.get_attr(cos.args[0].target)
    again.meta = dict(cos.args[0].meta)
    again.append(cos)
    cos.update_arg(0, again)


def _write_constant_again(edited: GraphModule) -> None:
    constant = node_of(edited, "add_").args[0]
    last = edited.graph.find_nodes(op="output")[0].prev
    call_after(edited, last, aten.mul_.Tensor, constant, 2).meta["val"] = constant.meta["val"]


@pytest.mark.parametrize("edit", [_read_constant_late, _write_constant_again])
def test_the_memory_of_a_constant_is_there_before_and_after_the_graph_runs(edit: Edit):
    assert "[memory order]" in problems_of(capture(_written_constant, X), edit)


def _drop_write_of_constant(edited: GraphModule) -> None:
    edited.graph.erase_node(node_of(edited, "add_"))


def _write_to_another_constant(edited: GraphModule) -> None:
    edited.register_buffer("another", torch.ones(4, 6))
    add = node_of(edited, "add_")
    with edited.graph.inserting_before(add):
        another = edited.graph.get_attr("another")
    another.meta = dict(add.args[0].meta)
    add.update_arg(0, another)


@pytest.mark.parametrize(
    "edit", [_write_constant_again, _drop_write_of_constant, _write_to_another_constant]
)
def test_what_is_left_in_a_constant_is_compared(edit: Edit):
    def step(x):
        early = _CONSTANT.sin()
        _CONSTANT.add_(x)
        return early

    graph_module = capture(step, X)
    with pytest.raises(VerificationError, match="what is left in constant _tensor_constant0"):
        run_pass(EditGraph(edit=edit, allowed=FREELY), graph_module)


def put_in_a_region(edited: GraphModule, *names: str) -> Node:
    outliner = RegionOutliner(edited)
    outline = outliner.outline([node_of(edited, name) for name in names])
    body = outliner.body(outline)
    call = outliner.replace(outline, OutlinedRegion(body, body), stem="region")
    outliner.finish()
    return call


def two_writes(x, buffer):
    early, high, low = buffer.cos(), x.exp(), x.log()
    buffer.add_(high)
    buffer.mul_(low)
    return early, buffer.sin(), high, low


@pytest.mark.parametrize(
    "names", ["cos", "sin", "mul_", "exp log", "add_ mul_", "cos exp log add_"]
)
def test_a_region_is_what_it_stands_for(names: str):
    def edit(edited: GraphModule) -> None:
        put_in_a_region(edited, *names.split())

    def edit_again(edited: GraphModule) -> None:
        call = node_of(edited, "run_region")
        put_in_a_region(edited, call.name, *(item.name for item in call.users))

    graph_module = capture(two_writes, X, X.clone())
    for each in (edit, edit_again):
        run_pass(EditGraph(edit=each, allowed=FREELY), graph_module)


def _swap_items(edited: GraphModule) -> None:
    region = put_in_a_region(edited, "exp", "log")
    first, second = region.users
    first.args, second.args = second.args, first.args


def _read_in_a_region_late(edited: GraphModule) -> None:
    region = put_in_a_region(edited, "cos")
    item = next(iter(region.users))
    node_of(edited, "add_").append(region)
    region.append(item)


def _read_after_the_second_region(edited: GraphModule) -> None:
    put_in_a_region(edited, "exp")  # writes to nothing, which says nothing of the other
    put_in_a_region(edited, "add_", "mul_").append(node_of(edited, "cos"))


def _read_another(edited: GraphModule) -> None:
    region = put_in_a_region(edited, "cos")
    region.update_arg(1, node_of(edited, "x_1"))


def _another_body(edited: GraphModule) -> None:
    region = put_in_a_region(edited, "exp", "log")
    body = edited.get_submodule(region.args[0].target).body
    node_of(body, "log").target = aten.exp.default


@pytest.mark.parametrize(
    "edit",
    [
        _swap_items,
        _read_in_a_region_late,
        _read_after_the_second_region,
        _read_another,
        _another_body,
    ],
)
def test_a_region_that_computes_something_else_is_found(edit: Edit):
    with pytest.raises(VerificationError, match=r"dataflow|memory order"):
        run_pass(EditGraph(edit=edit, allowed=FREELY), capture(two_writes, X, X.clone()))


def test_random_draws_that_change_their_order_are_found():
    def step(x):
        return torch.rand_like(x), x.bernoulli(), torch.rand_like(x)

    graph_module = capture(step, X)
    assert_expected_inline(
        problems_of(graph_module, move("rand_like", after="bernoulli")),
        """\
[random numbers] node bernoulli (aten.bernoulli.default)
it draws random numbers that another node drew before
expected rand_like to draw first
got      bernoulli draws first""",
    )
    assert (
        problems_of(capture(lambda x: (x.bernoulli(), x.cos()), X), move("bernoulli", after="cos"))
        == ""
    )


@pytest.mark.filterwarnings("ignore:Raw SymInt value")
def test_a_size_that_no_node_gives_is_found():
    def view_as_recorded(edited: GraphModule) -> None:
        rows, cos = node_of(edited, "index"), node_of(edited, "cos")
        shape = [*rows.meta["val"].shape]
        cos.update_arg(0, call_after(edited, rows, aten.view.default, rows, shape))

    def step(x, y):
        return x[y.nonzero().squeeze(1)].cos()

    assert_expected_inline(
        problems_of(capture(step, X, X[:, 0]), view_as_recorded),
        """\
[well-formed] node view_default (aten.view.default)
the size u0 among its arguments is of no node
expected a node, as of aten.sym_size.int(tensor, dim)""",
    )
