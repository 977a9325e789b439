"""When ShareAllGathers makes one gathering serve several readers, and when it must not."""

from __future__ import annotations

import copy

import torch
from expecttest import assert_expected_inline
from pass_graphs import capture, collectives, program, run_pass, same_bits, unshard
from torch.fx import GraphModule

from gt_config.node_keys import FsdpCollectiveAnnotation, PhaseAnnotation
from gt_passes import ShareAllGathers
from gt_trace.annotate import annotate, phase

W = torch.arange(16, dtype=torch.float32).reshape(4, 4) / 7
X = torch.ones(2, 4)


def tied(group: str = "fsdp", num_ranks: int = 1) -> GraphModule:
    def step(w, x):
        y = x @ unshard(w, group=group, num_ranks=num_ranks, dtype=torch.bfloat16).float()
        return y @ unshard(w, group=group, num_ranks=num_ranks, dtype=torch.bfloat16).float().t()

    return capture(step, W, X)


def test_can_share_a_chain_with_its_cast():
    """
    w ── cast ── all-gather ── wait ─┬─ mm        w ── cast ── all-gather ── wait ─┬─ mm
    w ── cast ── all-gather ── wait ─┴─ mm   =>                                    └─ mm
    """
    graph_module = tied()
    report = run_pass(ShareAllGathers(), graph_module)
    assert_expected_inline(
        program(graph_module),
        """\
_to_copy = aten._to_copy.default(w_1, dtype=torch.bfloat16)
all_gather_into_tensor = _c10d_functional.all_gather_into_tensor.default(_to_copy, 1, fsdp)
wait_tensor = _c10d_functional.wait_tensor.default(all_gather_into_tensor)
_to_copy_1 = aten._to_copy.default(wait_tensor, dtype=torch.float32)
mm = aten.mm.default(x_1, _to_copy_1)
_to_copy_3 = aten._to_copy.default(wait_tensor, dtype=torch.float32)
t = aten.t.default(_to_copy_3)
mm_1 = aten.mm.default(mm, t)
return mm_1
""",
    )
    assert report.counts == {"all_gathers_shared": 1, "nodes_shared": 3}


def test_running_again_changes_nothing():
    graph_module = tied()
    run_pass(ShareAllGathers(), graph_module)
    before = program(graph_module)
    assert not run_pass(ShareAllGathers(), graph_module).changed
    assert program(graph_module) == before


def test_results_keep_every_bit(one_rank_group):
    graph_module = tied(one_rank_group)
    reference = copy.deepcopy(graph_module)
    run_pass(ShareAllGathers(), graph_module)
    assert program(graph_module) != program(reference)
    assert same_bits(graph_module(W, X), reference(W, X))


def test_can_share_pads_splits_and_slices():
    def uneven(w):
        with annotate(
            FsdpCollectiveAnnotation(kind="unshard", parameter_names=("w",), mesh_axis="fsdp")
        ):
            padded = torch.nn.functional.pad(w, [0, 0, 0, 1])
            gathered = collectives.all_gather_into_tensor(padded, 2, "fsdp")
            first, second = collectives.wait_tensor(gathered).split(5)
            return torch.cat([first, second[:3]])

    graph_module = capture(lambda w: (uneven(w).cos(), uneven(w).sin()), W)
    run_pass(ShareAllGathers(), graph_module)
    assert_expected_inline(
        program(graph_module),
        """\
constant_pad_nd = aten.constant_pad_nd.default(w_1, [0, 0, 0, 1], 0.0)
all_gather_into_tensor = _c10d_functional.all_gather_into_tensor.default(constant_pad_nd, 2, fsdp)
wait_tensor = _c10d_functional.wait_tensor.default(all_gather_into_tensor)
split = aten.split.Tensor(wait_tensor, 5)
getitem = getitem(split, 0)
getitem_1 = getitem(split, 1)
slice_1 = aten.slice.Tensor(getitem_1, 0, 0, 3)
cat = aten.cat.default([getitem, slice_1])
cos = aten.cos.default(cat)
sin = aten.sin.default(cat)
return [cos, sin]
""",
    )


def test_can_share_up_to_where_chains_part():
    def step(w, x):
        gathered = unshard(w, group="fsdp")
        y = x @ gathered
        with annotate(
            FsdpCollectiveAnnotation(kind="unshard", parameter_names=("w",), mesh_axis="fsdp")
        ):
            again = unshard(w, group="fsdp").view(2, 8)
        return y, again.cos()

    graph_module = capture(step, W, X)
    run_pass(ShareAllGathers(), graph_module)
    assert_expected_inline(
        program(graph_module),
        """\
all_gather_into_tensor = _c10d_functional.all_gather_into_tensor.default(w_1, 1, fsdp)
wait_tensor = _c10d_functional.wait_tensor.default(all_gather_into_tensor)
mm = aten.mm.default(x_1, wait_tensor)
view = aten.view.default(wait_tensor, [2, 8])
cos = aten.cos.default(view)
return [mm, cos]
""",
    )


def test_cannot_share_chains_that_differ():
    def step(w, v, x):
        return (
            x @ unshard(w, group="fsdp"),
            x @ unshard(v, group="fsdp"),
            x @ unshard(w, group="other"),
            x.bfloat16() @ unshard(w, group="fsdp", dtype=torch.bfloat16),
        )

    report = run_pass(ShareAllGathers(), capture(step, W, W.clone(), X))
    assert not report.changed
    assert report.refusals == ()


def test_cannot_share_what_is_not_annotated():
    def gather(w):
        return collectives.wait_tensor(collectives.all_gather_into_tensor(w, 2, "tp"))

    graph_module = capture(lambda w: (gather(w).cos(), gather(w).sin()), W)
    before = program(graph_module)
    assert not run_pass(ShareAllGathers(), graph_module).changed
    assert program(graph_module) == before


def test_cannot_share_across_a_write_to_the_parameter(one_rank_group):
    def step(w, x):
        y = x @ unshard(w, group=one_rank_group)
        w.view(16).add_(1)
        return y, x @ unshard(w, group=one_rank_group), x + unshard(w, group=one_rank_group)[:2]

    graph_module = capture(step, W.clone(), X)
    reference = copy.deepcopy(graph_module)
    report = run_pass(ShareAllGathers(), graph_module)
    assert report.counts == {"all_gathers_shared": 1, "nodes_shared": 2}  # of the last two
    assert_expected_inline(
        "\n".join(map(str, report.refusals)),
        """all_gather_into_tensor_1: its input is written to after all_gather_into_tensor, which it equals""",
    )
    assert same_bits(graph_module(W.clone(), X), reference(W.clone(), X))


def test_cannot_share_a_gathered_value_that_is_written_to(one_rank_group):
    def step(w, x):
        first = unshard(w, group=one_rank_group)
        first.mul_(2)
        return x @ first, x @ unshard(w, group=one_rank_group)

    graph_module = capture(step, W.clone(), X)
    reference = copy.deepcopy(graph_module)
    report = run_pass(ShareAllGathers(), graph_module)
    assert not report.changed
    assert_expected_inline(
        report.refusals[0].reason,
        """all_gather_into_tensor, one of the two equal values, is written to""",
    )
    assert same_bits(graph_module(W.clone(), X), reference(W.clone(), X))


def test_cannot_make_two_outputs_one():
    graph_module = capture(lambda w: (unshard(w, group="fsdp"), unshard(w, group="fsdp")), W)
    report = run_pass(ShareAllGathers(), graph_module)
    assert not report.changed
    assert_expected_inline(
        report.refusals[0].reason,
        """both it and its equal all_gather_into_tensor are outputs""",
    )


def test_phase_scope_gathers_once_in_forward_and_once_in_backward():
    def step(w, x):
        results = []
        for name in ("forward", "forward", "backward", "backward"):
            with phase(name):
                results.append(x @ unshard(w, group="fsdp"))
        return tuple(results)

    assert PhaseAnnotation(phase="backward")  # what `phase` writes
    graph_module = capture(step, W, X)
    report = run_pass(ShareAllGathers(scope="phase"), graph_module)
    assert report.counts["all_gathers_shared"] == 2
    report = run_pass(ShareAllGathers(), graph_module)
    assert report.counts["all_gathers_shared"] == 1
