"""Copies to and from the host are checked in flight, as collectives are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from device_graphs import capture_on
from edited_graphs import EditGraph, X, aten, call_after
from expecttest import assert_expected_inline
from pass_graphs import capture, node_of, run_pass
from torch.fx import GraphModule

from gt_passes import ChangeBounds, VerificationError
from gt_passes.analysis.host_copies import OFFLOAD, RELOAD, WAIT_COPY

_ANY_MEMORY = ChangeBounds(peak_memory_growth=None)


def offloaded(*, is_written: bool = False) -> GraphModule:
    """``cos`` goes to the host and comes back; another value does the same."""

    def step(x):
        value, other = x.cos(), x.sin()
        started, other_started = OFFLOAD(value), OFFLOAD(other)
        host, other_host = WAIT_COPY(started, value), WAIT_COPY(other_started, other)
        if is_written:
            value.mul_(2.0)
        returning, other_returning = RELOAD(host, x.device), RELOAD(other_host, x.device)
        back, other_back = WAIT_COPY(returning, host), WAIT_COPY(other_returning, other_host)
        return back.exp(), other_back.exp(), value.sin()

    return capture(step, X)


def problems_of(graph_module: GraphModule, edit: Callable[[GraphModule], None]) -> str:
    """What the verifier says of a pass that claims to keep the dataflow."""
    try:
        run_pass(EditGraph(edit=edit, allowed=_ANY_MEMORY), graph_module)
    except VerificationError as error:
        return "\n".join(map(str, error.problems))
    return ""


@pytest.mark.parametrize("is_written", [False, True])
def test_copies_that_are_waited_for_are_accepted(is_written):
    assert problems_of(offloaded(is_written=is_written), lambda edited: None) == ""


def test_a_reload_that_is_read_before_its_wait_is_found():
    def read_early(edited: GraphModule) -> None:
        node_of(edited, "exp").update_arg(0, node_of(edited, "reload"))

    assert_expected_inline(
        problems_of(offloaded(), read_early),
        """\
[copy waits] node exp (aten.exp.default)
it reads reload, a copy in flight, unwaited
expected a use of wait_copy(reload, wait_copy)""",
    )


def test_a_copy_to_the_host_that_comes_back_before_its_wait_is_found():
    def come_back_early(edited: GraphModule) -> None:
        node_of(edited, "reload").update_arg(0, node_of(edited, "offload"))

    found = problems_of(offloaded(), come_back_early)
    assert "it reads offload, a copy in flight, unwaited" in found


def test_a_view_of_a_copy_in_flight_is_found():
    def view(edited: GraphModule) -> None:
        reload = node_of(edited, "reload")
        viewed = call_after(edited, reload, aten.alias.default, reload)
        node_of(edited, "exp").update_arg(0, viewed)

    assert "it reads reload, a copy in flight, unwaited" in problems_of(offloaded(), view)


@pytest.mark.parametrize("name", ["wait_copy", "wait_copy_2"])
def test_a_wait_that_is_dropped_is_found(name):
    def drop(edited: GraphModule) -> None:
        wait = node_of(edited, name)
        wait.replace_all_uses_with(wait.args[0])
        edited.graph.erase_node(wait)

    found = problems_of(offloaded(), drop)
    assert "this copy is never waited for" in found
    assert "a copy in flight, unwaited" in found


def test_a_wait_that_names_another_source_is_found():
    def rename(edited: GraphModule) -> None:
        node_of(edited, "wait_copy").update_arg(1, node_of(edited, "sin"))

    assert_expected_inline(
        problems_of(offloaded(), rename),
        """\
[copy waits] node wait_copy (gt_passes.wait_copy.default)
it names sin as what offload copies, whose memory is then not kept
expected wait_copy(offload, cos)""",
    )


def test_a_wait_for_another_copy_is_found():
    def exchange(edited: GraphModule) -> None:
        node_of(edited, "wait_copy_2").update_arg(0, node_of(edited, "reload_1"))

    found = problems_of(offloaded(), exchange)
    assert "this copy is never waited for" in found
    assert "it is not the only wait for reload_1" in found


def test_a_wait_for_what_was_waited_for_is_found():
    def wait_again(edited: GraphModule) -> None:
        wait = node_of(edited, "wait_copy_2")
        again = call_after(edited, wait, WAIT_COPY, wait, wait.args[1])
        node_of(edited, "exp").update_arg(0, again)

    found = problems_of(offloaded(), wait_again)
    assert "it waits for wait_copy_2, which starts no copy" in found


def test_a_write_to_a_tensor_while_it_is_copied_out_is_found():
    def write_early(edited: GraphModule) -> None:
        node_of(edited, "offload").append(node_of(edited, "mul_"))

    assert_expected_inline(
        problems_of(offloaded(is_written=True), write_early),
        """\
[copy waits] node mul_ (aten.mul_.Tensor)
it touches the memory of cos while the copy offload is in flight
expected to stand before offload or after its wait
got      to stand between them""",
    )


def test_a_write_to_host_memory_while_it_is_copied_back_is_found():
    def step(x):
        value = x.cos()
        host = WAIT_COPY(OFFLOAD(value), value)
        back = WAIT_COPY(RELOAD(host, x.device), host)
        host.mul_(2.0)
        return back.exp(), host.sin()

    graph_module = capture(step, X)
    assert problems_of(graph_module, lambda edited: None) == ""

    def write_early(edited: GraphModule) -> None:
        node_of(edited, "reload").append(node_of(edited, "mul_"))

    found = problems_of(graph_module, write_early)
    assert "it touches the memory of wait_copy while the copy reload is in flight" in found


@pytest.mark.parametrize("is_in_place", [False, True])
def test_a_copy_between_devices_that_does_not_block_is_another_value(is_in_place):
    def step(x):
        if is_in_place:
            return torch.empty_like(x, device="cpu").copy_(x).exp()
        return aten._to_copy.default(x, device="cpu").exp()

    def do_not_block(edited: GraphModule) -> None:
        for target in (aten._to_copy.default, aten.copy_.default):
            for node in edited.graph.find_nodes(op="call_function", target=target):
                if is_in_place:
                    node.args = (*node.args, True)
                else:
                    node.kwargs = {**node.kwargs, "non_blocking": True}

    graph_module = capture_on(step, torch.empty(4, 6, device="meta"))
    assert problems_of(graph_module, lambda edited: None) == ""
    assert "is not computed as before" in problems_of(graph_module, do_not_block)
