"""Estimated memory against what tensors really hold, and which part is what."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from memory_models import capture_decoder, capture_stack
from pass_graphs import capture, collectives, unshard
from torch.fx import GraphModule

from gt_passes.analysis.host_copies import OFFLOAD, RELOAD, WAIT_COPY
from gt_passes.analysis.liveness import estimate_memory, estimate_peak_bytes
from gt_passes.testing import measure_peak_bytes
from gt_trace.annotate import phase

X = torch.zeros(256)  # 1024 bytes
KIB = 1024


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_peak_of_a_training_step_is_what_its_tensors_held(dropout: float):
    captured = capture_decoder(dropout=dropout)
    measured = measure_peak_bytes(captured.graph_module, captured.plain_inputs())
    estimated = estimate_peak_bytes(captured.graph_module)
    assert estimated == pytest.approx(measured, rel=0.01)  # 0.05 is asked


def test_kinds_add_up_to_the_peak():
    captured = capture_decoder()
    profile = estimate_memory(
        captured.graph_module, num_static_inputs=captured.step.num_static_inputs
    )
    parameter_bytes = sum(4 * p.numel() for p in captured.model.parameters())
    argument_bytes = sum(8 * argument.numel() for argument in captured.args)
    assert sum(profile.bytes_by_kind.values()) == profile.peak_bytes == max(profile.live_bytes)
    assert profile.bytes_by_kind["static inputs"] == parameter_bytes
    assert profile.bytes_by_kind["arguments"] == argument_bytes
    assert profile.bytes_by_kind["saved for backward"] > profile.peak_bytes / 2
    assert profile.peak_bytes == estimate_peak_bytes(captured.graph_module)
    over_nodes = profile.live_bytes_by_kind
    assert set(over_nodes["static inputs"]) == {parameter_bytes}
    saved = over_nodes["saved for backward"]
    assert (saved[0], saved[-1]) == (0, 0)
    assert max(saved) >= profile.bytes_by_kind["saved for backward"]


def live(graph_module: GraphModule, *inputs: torch.Tensor) -> list[int]:
    """KiB held at each operator; checked against the measured peak where inputs are given."""
    profile = estimate_memory(graph_module)
    if inputs:
        assert profile.peak_bytes == measure_peak_bytes(graph_module, inputs)
    operators = [node.op == "call_function" for node in graph_module.graph.nodes]
    return [
        held // KIB
        for held, is_operator in zip(profile.live_bytes, operators, strict=True)
        if is_operator
    ]


def test_a_value_is_let_go_after_its_last_reader():
    #                                           cos  sin  exp
    assert live(capture(lambda x: x.cos().sin().exp(), X), X) == [2, 3, 3]


def test_a_view_keeps_its_base_and_takes_nothing():
    def step(x):
        base = x.cos()
        view = base.view(16, 16)[2:]
        return x.sin() + view.sum()

    #                                 cos view slice sin sum add
    assert live(capture(step, X), X) == [2, 2, 2, 3, 3, 3]


def test_parts_of_a_split_share_one_storage():
    def step(x):
        first, second = x.cos().split(128)
        return first.sin() + second

    #              cos split getitem getitem sin add
    assert live(capture(step, X), X) == [2, 2, 2, 2, 2, 3]


def test_operators_in_place_take_nothing():
    assert live(capture(lambda x: x.cos().add_(1).mul_(2).sin(), X), X) == [2, 2, 2, 3]


def test_each_result_of_an_operator_has_its_own_life():
    def step(x):
        values, indices = x.sort()  # 1 KiB and 2 KiB
        return values.cos().sin() + indices.sum()

    #                                   sort getitems cos sin sum add
    assert live(capture(step, X), X) == [4, 4, 4, 5, 5, 4, 3]


def test_outputs_and_inputs_live_to_the_end():
    assert live(capture(lambda x: (x.cos(), x.sin().exp().sum()), X), X) == [2, 3, 4, 3]


def test_a_copy_of_a_node_makes_its_own_memory():
    graph_module = capture(lambda x: x.cos().sin() + 1, X)
    cos = next(node for node in graph_module.graph.nodes if node.name == "cos")
    with graph_module.graph.inserting_after(cos):
        copy = graph_module.graph.node_copy(cos, lambda node: node)
    assert copy.meta["val"] is cos.meta["val"]
    (output,) = graph_module.graph.find_nodes(op="output")
    output.args = ([output.args[0], copy],)
    graph_module.recompile()
    assert live(graph_module, X) == [2, 3, 4, 4]


def test_what_a_collective_is_given_lives_until_the_wait(one_rank_group):
    def step(x):
        gathered = collectives.all_gather_into_tensor(x.cos(), 1, one_rank_group)
        other = x.sin().exp()
        return collectives.wait_tensor(gathered) + other

    #              cos gather sin exp wait add
    assert live(capture(step, X)) == [2, 3, 4, 5, 4, 4]


def test_blocks_round_sizes_up():
    graph_module = capture(lambda x: x.cos(), torch.zeros(3))
    assert estimate_memory(graph_module).peak_bytes == 24
    assert estimate_memory(graph_module, block_bytes=512).peak_bytes == 1024


def test_gathered_parameters_are_told_apart(one_rank_group):
    def step(w, x):
        with phase("forward"):
            y = x * unshard(w, group=one_rank_group)
        with phase("backward"):
            return y.sin()

    profile = estimate_memory(capture(step, X, X), num_static_inputs=1)
    assert dict(profile.bytes_by_kind) == {
        "static inputs": KIB,
        "arguments": KIB,
        "outputs": 0,
        "gathered parameters": KIB,
        "saved for backward": KIB,
        "temporaries": 0,
    }


def test_inputs_that_are_given_up_live_until_they_are_used():
    def step(total, x):
        total = total + x
        return total, x.sin().sin().sin()

    graph_module = capture(step, X, X.clone())
    total, _ = graph_module.graph.find_nodes(op="placeholder")
    held = estimate_memory(graph_module)
    given_up = estimate_memory(
        graph_module, released_inputs=[total], input_kinds={total: "outputs"}
    )
    #                                   add  sin  sin  sin  output
    assert held.live_bytes[2:] == tuple(n * KIB for n in (3, 4, 5, 5, 4))
    assert given_up.live_bytes[2:] == tuple(n * KIB for n in (3, 3, 4, 4, 3))
    assert (held.bytes_by_kind["arguments"], held.bytes_by_kind["outputs"]) == (2 * KIB, KIB)
    assert given_up.bytes_by_kind["arguments"] == KIB


def test_copies_in_host_memory_count_apart():
    def step(x):
        y = x.cos()
        host = WAIT_COPY(OFFLOAD(y), y)
        z = x.sin().exp()
        return z + WAIT_COPY(RELOAD(host, x.device), host)

    graph_module = capture(step, X)
    profile = estimate_memory(graph_module)
    #                        cos offload wait sin exp reload wait add
    assert live(graph_module) == [2, 2, 2, 2, 3, 3, 3, 4]
    assert profile.host_peak_bytes == KIB
    both = map(sum, zip(profile.live_bytes, profile.host_live_bytes, strict=True))
    assert max(both) == measure_peak_bytes(graph_module, [X])


def test_the_profile_of_a_device_leaves_out_host_memory():
    with torch.device("meta"):
        fakes = torch.zeros(256), torch.zeros(256)
    graph_module = capture(lambda x, y: x.cos() + y, *fakes)
    device_profile = estimate_memory(graph_module)
    assert (device_profile.device_type, device_profile.peak_bytes) == ("meta", 4 * KIB)
    placeholder = graph_module.graph.find_nodes(op="placeholder")[1]
    with placeholder.meta["val"].fake_mode:
        placeholder.meta["val"] = torch.empty(256)
    profile = estimate_memory(graph_module)
    assert (profile.peak_bytes, profile.host_peak_bytes) == (3 * KIB, KIB)


def test_a_profile_prints_what_is_held_at_the_peak():
    captured = capture_stack(dim=256)
    profile = estimate_memory(
        captured.graph_module, num_static_inputs=captured.step.num_static_inputs
    )
    assert_expected_inline(
        str(profile),
        """\
peak 4.02 MiB on cpu at mm_10
  static inputs             2.00 MiB
  arguments                 0.01 MiB
  outputs                   2.00 MiB
  gathered parameters       0.00 MiB
  saved for backward        0.00 MiB
  temporaries               0.02 MiB""",
    )
