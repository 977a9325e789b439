"""After a pass: waits, races, writes, unknown operators, groups, and what may be removed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from edited_graphs import ReplaceOperators, X, aten, call_after, move, problems_of, updated_buffer
from expecttest import assert_expected_inline
from pass_graphs import capture, collectives, node_of
from torch.fx import GraphModule

from gt_passes import (
    ChangeBounds,
    PassContext,
    PassManager,
)

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
