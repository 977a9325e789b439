"""When RecomputeTagged computes again, where, and when it must not."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from expecttest import assert_expected_inline
from memory_models import Captured, Mlp, capture_decoder, capture_stack, run
from pass_graphs import node_of, program, same_bits
from torch import nn
from torch.fx import GraphModule

from gt_config import MemoryPolicy
from gt_config.node_keys import ModuleAnnotation, PhaseAnnotation, ResidencyAnnotation
from gt_passes import (
    CanonicalizeViews,
    PassManager,
    RecomputeTagged,
    RemoveDeadCode,
    TagSavedTensors,
)
from gt_passes.analysis.liveness import estimate_peak_bytes
from gt_passes.testing import measure_peak_bytes
from gt_trace.node_metadata import read_annotation, write_annotation

TIDY = (RemoveDeadCode(), CanonicalizeViews())
RECOMPUTE = ResidencyAnnotation(residency="recompute")


def recomputed(
    captured: Captured, policy: MemoryPolicy = "full_recompute"
) -> tuple[GraphModule, GraphModule]:
    """The graph before and after the pass, in a verified run."""
    run(captured, *TIDY)
    before = copy.deepcopy(captured.graph_module)
    run(captured, TagSavedTensors(policy=policy), RecomputeTagged())
    return before, captured.graph_module


def test_recomputes_right_before_the_first_reader():
    """
    mm ── silu ── mm_1 ─ ... ─ silu_backward(mm)      mm ── silu ── mm_1 ─ ... ─ mm' ─ silu' ─ ...
           └────────────────── t(silu)           =>
    """
    _, graph_module = recomputed(capture_stack())
    assert_expected_inline(
        program(graph_module),
        """\
mm = aten.mm.default(a_x, p_layers_0_up)
silu = aten.silu.default(mm)
mm_1 = aten.mm.default(silu, p_layers_0_down)
mm_2 = aten.mm.default(mm_1, p_layers_1_up)
silu_1 = aten.silu.default(mm_2)
mm_3 = aten.mm.default(silu_1, p_layers_1_down)
pow_1 = aten.pow.Tensor_Scalar(mm_3, 2)
mean = aten.mean.default(pow_1)
ones_like = aten.ones_like.default(mean, pin_memory=False, memory_format=torch.preserve_format)
expand = aten.expand.default(ones_like, [8, 4])
div = aten.div.Scalar(expand, 32)
pow_2 = aten.pow.Tensor_Scalar(mm_3, 1.0)
mul = aten.mul.Scalar(pow_2, 2.0)
mul_1 = aten.mul.Tensor(div, mul)
mm_2_recomputed = aten.mm.default(mm_1, p_layers_1_up)
silu_1_recomputed = aten.silu.default(mm_2_recomputed)
t = aten.t.default(silu_1_recomputed)
mm_4 = aten.mm.default(t, mul_1)
t_1 = aten.t.default(p_layers_1_down)
mm_5 = aten.mm.default(mul_1, t_1)
silu_backward = aten.silu_backward.default(mm_5, mm_2_recomputed)
t_2 = aten.t.default(mm_1)
mm_6 = aten.mm.default(t_2, silu_backward)
t_3 = aten.t.default(p_layers_1_up)
mm_7 = aten.mm.default(silu_backward, t_3)
mm_recomputed = aten.mm.default(a_x, p_layers_0_up)
silu_recomputed = aten.silu.default(mm_recomputed)
t_4 = aten.t.default(silu_recomputed)
mm_8 = aten.mm.default(t_4, mm_7)
t_5 = aten.t.default(p_layers_0_down)
mm_9 = aten.mm.default(mm_7, t_5)
silu_backward_1 = aten.silu_backward.default(mm_9, mm_recomputed)
t_6 = aten.t.default(a_x)
mm_10 = aten.mm.default(t_6, silu_backward_1)
return [mean, mm_10, mm_8, mm_6, mm_4]
""",
    )


def test_selective_recomputes_only_what_is_cheap():
    before, graph_module = recomputed(capture_stack(), "selective")
    new = {node.name for node in graph_module.graph.nodes} - {
        node.name for node in before.graph.nodes
    }
    assert new == {"silu_recomputed", "silu_1_recomputed"}


def test_without_tags_nothing_changes():
    captured = capture_stack()
    before = program(captured.graph_module)
    report = run(captured, RecomputeTagged())
    assert not report.records[0].report.changed
    assert program(captured.graph_module) == before


@pytest.mark.parametrize("policy", ["selective", "full_recompute"])
def test_recomputing_again_changes_nothing(policy: MemoryPolicy):
    captured = capture_decoder(dropout=0.1)
    recomputed(captured, policy)
    before = program(captured.graph_module)
    for again in (run(captured, RecomputeTagged()), run(captured, TagSavedTensors(policy=policy))):
        assert not again.records[0].report.counts.get("recomputed")
    assert program(captured.graph_module) == before


@pytest.mark.parametrize("policy", ["selective", "selective_alternate", "full_recompute"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_loss_and_gradients_keep_every_bit(policy: MemoryPolicy, dropout: float):
    captured = capture_decoder(dropout=dropout)
    before, after = recomputed(captured, policy)
    assert program(before) != program(after)
    assert same_bits(captured.outputs(before), captured.outputs(after))


@pytest.mark.parametrize(("policy", "at_most"), [("selective", 0.85), ("full_recompute", 0.7)])
def test_the_peak_falls_as_estimated_and_as_measured(policy: MemoryPolicy, at_most: float):
    captured = capture_decoder(num_layers=4, dropout=0.1)
    before, after = recomputed(captured, policy)
    inputs = captured.plain_inputs()
    assert estimate_peak_bytes(after) <= at_most * estimate_peak_bytes(before)
    assert measure_peak_bytes(after, inputs) <= at_most * measure_peak_bytes(before, inputs)
    assert estimate_peak_bytes(after) == pytest.approx(measure_peak_bytes(after, inputs), rel=0.01)


def test_copies_keep_their_module_and_belong_to_the_backward():
    _, graph_module = recomputed(capture_stack())
    copied = node_of(graph_module, "silu_1_recomputed")
    assert read_annotation(copied, ModuleAnnotation) == ModuleAnnotation(fqn="layers.1")
    assert read_annotation(copied, PhaseAnnotation) == PhaseAnnotation(phase="backward")
    assert read_annotation(copied, ResidencyAnnotation) is None
    assert copied.meta["seq_nr"] == node_of(graph_module, "silu_1").meta["seq_nr"]


class TwoProducts(nn.Module):
    """A layer that reads first what it has computed last, as a collective that was launched early."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(dim, 2 * dim))
        self.gate = nn.Parameter(torch.randn(dim, 2 * dim))
        self.down = nn.Parameter(torch.randn(2 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early, late = x @ self.up, x @ self.gate
        return (late - early) @ self.down


def test_what_one_reader_needs_comes_in_the_order_of_the_forward():
    _, graph_module = recomputed(capture_stack([TwoProducts(4), TwoProducts(4)]))
    names = [node.name for node in graph_module.graph.nodes if node.name.endswith("_recomputed")]
    assert names == [
        *("mm_3_recomputed", "mm_4_recomputed", "sub_1_recomputed"),
        *("mm_recomputed", "mm_1_recomputed", "sub_recomputed"),
    ]


class Doubling(nn.Module):
    """A layer whose backward reads much less than what it is computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (x.tile(64).cos().sum() * self.weight).sin()


def refusals_of(captured: Captured, *names: str) -> list[str]:
    """Tag nodes by hand and run the pass; it must leave the graph alone."""
    for name in names:
        write_annotation(node_of(captured.graph_module, name), RECOMPUTE)
    before = program(captured.graph_module)
    (record,) = run(captured, RecomputeTagged()).records
    assert not record.report.changed
    assert program(captured.graph_module) == before
    for name in names:
        tag = read_annotation(node_of(captured.graph_module, name), ResidencyAnnotation)
        assert tag == ResidencyAnnotation(residency="save")
    return list(map(str, record.report.refusals))


def test_cannot_recompute_if_that_would_take_more_memory():
    captured = capture_stack([Doubling()])
    (refusal,) = refusals_of(captured, "repeat", "cos", "sum_1")
    assert "recomputing would raise the estimated peak from" in refusal


def test_what_waiting_microbatches_save_outweighs_a_higher_peak_of_one():
    captured = capture_stack([Doubling()])
    before = copy.deepcopy(captured.graph_module)
    for name in ("repeat", "cos", "sum_1"):
        write_annotation(node_of(captured.graph_module, name), RECOMPUTE)
    waiting = dataclasses.replace(captured.context, num_live_microbatches=4)
    PassManager([RecomputeTagged()], context=waiting).run(captured.graph_module)
    after = captured.graph_module
    assert same_bits(captured.outputs(before), captured.outputs(after))
    assert estimate_peak_bytes(before) < estimate_peak_bytes(after)
    assert estimate_peak_bytes(after, num_live_microbatches=4) < estimate_peak_bytes(
        before, num_live_microbatches=4
    )


def test_cannot_draw_random_numbers_again():
    captured = capture_decoder(dropout=0.1)
    run(captured, *TIDY)
    names = [
        node.name for node in captured.graph_module.graph.nodes if "bernoulli" in str(node.target)
    ]
    assert_expected_inline(
        "\n".join(refusals_of(captured, *names[:1])), """bernoulli_: it draws random numbers"""
    )


def test_cannot_recompute_half_of_a_chain_in_place():
    captured = capture_decoder(num_layers=1)
    assert_expected_inline(
        "\n".join(refusals_of(captured, "add_")),
        """add_: it is made together with mean, which is not tagged""",
    )


def test_cannot_read_memory_that_has_changed():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scaled = x * self.seen.cos()
            with torch.no_grad():
                self.seen.add_(1)
            return scaled

    captured = capture_stack([Mlp(4), Counting()])
    assert_expected_inline(
        "\n".join(refusals_of(captured, "cos")),
        """cos: it is computed from memory that add_ writes to later""",
    )


def test_long_chains_need_no_recursion():
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(1100):
                x = x + 1
            return (x * self.weight).sin()

    captured = capture_stack([Chain()])
    before, after = recomputed(captured)
    assert len(after.graph.nodes) > len(before.graph.nodes) + 1000
    assert same_bits(captured.outputs(before), captured.outputs(after))
