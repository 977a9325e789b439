"""Where OffloadTagged starts copies and waits for them, and what it leaves alone."""

from __future__ import annotations

import copy

import pytest
import torch
from expecttest import assert_expected_inline
from memory_models import Captured, Mlp, capture_decoder, capture_stack, run
from pass_graphs import node_of, program, same_bits
from torch.fx import GraphModule

from gt_config.node_keys import PhaseAnnotation, ResidencyAnnotation
from gt_passes import (
    CanonicalizeViews,
    OffloadTagged,
    RecomputeTagged,
    RemoveDeadCode,
    TagSavedTensors,
)
from gt_passes.analysis.liveness import estimate_memory, estimate_peak_bytes
from gt_passes.testing import measure_peak_bytes
from gt_trace.node_metadata import read_annotation, write_annotation

TIDY = (RemoveDeadCode(), CanonicalizeViews())
OFFLOAD = ResidencyAnnotation(residency="offload")


def stack(num_layers: int = 4) -> Captured:
    """Layers of which the test tags one product each by hand."""
    captured = capture_stack([Mlp(4) for _ in range(num_layers)])
    run(captured, *TIDY)
    return captured


def offload(captured: Captured, *names: str, **distances: int) -> list[str]:
    """Tag nodes, run the pass verified, and return what it refused."""
    for name in names:
        write_annotation(node_of(captured.graph_module, name), OFFLOAD)
    (record,) = run(captured, OffloadTagged(**distances)).records
    return list(map(str, record.report.refusals))


def course(graph_module: GraphModule) -> str:
    """Copies, waits and products in execution order; the way of the copies past the layers."""
    lines = []
    for node in graph_module.graph.nodes:
        if str(node.target).startswith("gt_passes."):
            lines.append(f"    {node.name} = {node.target}({', '.join(map(str, node.args))})")
        elif str(node.target) == "aten.mm.default":
            lines.append(f"{node.name}")
    return "\n".join(lines) + "\n"


def test_copies_pass_one_layer_each_way():
    """
    forward   0 ─ 1 ─│ 2 ─ 3       the wait before layer 2
    backward  3 ─ 2 ─│ 1 ─ 0       the start of the way back before layer 1
    """
    captured = stack()
    assert offload(captured, "mm") == []
    assert_expected_inline(
        course(captured.graph_module),
        """\
mm
    mm_offload = gt_passes.offload.default(mm)
mm_1
mm_2
mm_3
    mm_on_host = gt_passes.wait_copy.default(mm_offload, mm)
mm_4
mm_5
mm_6
mm_7
mm_8
mm_9
mm_10
mm_11
mm_12
mm_13
mm_14
mm_15
    mm_reload = gt_passes.reload.default(mm_on_host, cpu)
mm_16
mm_17
mm_18
mm_19
mm_20
mm_21
    mm_back = gt_passes.wait_copy.default(mm_reload, mm_on_host)
mm_22
""",
    )


def test_distances_may_be_nought():
    captured = stack()
    assert offload(captured, "mm", prefetch_layers=0, defer_layers=0) == []
    assert_expected_inline(
        course(captured.graph_module),
        """\
mm
    mm_offload = gt_passes.offload.default(mm)
mm_1
    mm_on_host = gt_passes.wait_copy.default(mm_offload, mm)
mm_2
mm_3
mm_4
mm_5
mm_6
mm_7
mm_8
mm_9
mm_10
mm_11
mm_12
mm_13
mm_14
mm_15
mm_16
mm_17
mm_18
mm_19
    mm_reload = gt_passes.reload.default(mm_on_host, cpu)
mm_20
mm_21
    mm_back = gt_passes.wait_copy.default(mm_reload, mm_on_host)
mm_22
""",
    )


def test_distances_beyond_the_ends_stop_there():
    captured = stack()
    assert offload(captured, "mm", prefetch_layers=9, defer_layers=2) == []
    assert_expected_inline(
        course(captured.graph_module),
        """\
mm
    mm_offload = gt_passes.offload.default(mm)
mm_1
mm_2
mm_3
mm_4
mm_5
    mm_on_host = gt_passes.wait_copy.default(mm_offload, mm)
mm_6
mm_7
    mm_reload = gt_passes.reload.default(mm_on_host, cpu)
mm_8
mm_9
mm_10
mm_11
mm_12
mm_13
mm_14
mm_15
mm_16
mm_17
mm_18
mm_19
mm_20
mm_21
    mm_back = gt_passes.wait_copy.default(mm_reload, mm_on_host)
mm_22
""",
    )


def test_refuses_distances_below_nought():
    with pytest.raises(ValueError, match="not 0 or more") as caught:
        OffloadTagged(prefetch_layers=-1, defer_layers=-2)
    assert_expected_inline(
        str(caught.value),
        """OffloadTagged: prefetch_layers is -1, not 0 or more; defer_layers is -2, not 0 or more""",
    )


def test_without_tags_nothing_changes():
    captured = stack()
    before = program(captured.graph_module)
    assert offload(captured) == []
    assert program(captured.graph_module) == before


def test_offloading_again_changes_nothing():
    captured = stack()
    offload(captured, "mm", "mm_2")
    before = program(captured.graph_module)
    assert offload(captured) == []
    assert program(captured.graph_module) == before


def offloaded_decoder(**options: object) -> tuple[Captured, GraphModule]:
    """A decoder after the whole policy, and its graph before."""
    captured = capture_decoder(num_layers=4, dropout=0.1)
    run(captured, *TIDY)
    before = copy.deepcopy(captured.graph_module)
    tag = TagSavedTensors(policy="offload", offload_min_bytes=1, **options)
    run(captured, tag, RecomputeTagged(), OffloadTagged())
    return captured, before


def test_loss_and_gradients_keep_every_bit():
    captured, before = offloaded_decoder()
    assert "gt_passes.offload" in program(captured.graph_module)
    assert same_bits(captured.outputs(before), captured.outputs())


def test_the_peak_falls_and_host_memory_is_what_was_measured():
    captured, before = offloaded_decoder()
    profile = estimate_memory(captured.graph_module)
    measured = measure_peak_bytes(captured.graph_module, captured.plain_inputs())
    both = map(sum, zip(profile.live_bytes, profile.host_live_bytes, strict=True))
    assert profile.peak_bytes < 0.75 * estimate_peak_bytes(before)
    assert max(both) == pytest.approx(measured, rel=0.01)


def test_host_memory_stays_within_its_budget():
    captured, _ = offloaded_decoder(host_budget_bytes=100_000)
    assert 50_000 < estimate_memory(captured.graph_module).host_peak_bytes <= 100_000


def test_copies_belong_to_the_phases_in_which_they_run():
    captured = stack()
    offload(captured, "mm")
    phases = [
        read_annotation(node_of(captured.graph_module, f"mm_{name}"), PhaseAnnotation)
        for name in ("offload", "on_host", "reload", "back")
    ]
    assert phases == [PhaseAnnotation(phase=name) for name in ("forward",) * 2 + ("backward",) * 2]


def test_cannot_offload_what_would_come_back_at_once():
    captured = stack()
    assert_expected_inline(
        "\n".join(offload(captured, "mm_6")),
        """mm_6: it would come back no later than it has left""",
    )
    tag = read_annotation(node_of(captured.graph_module, "mm_6"), ResidencyAnnotation)
    assert tag == ResidencyAnnotation(residency="save")


def test_cannot_offload_inputs_or_parts_of_memory():
    captured = capture_decoder()
    run(captured, *TIDY)
    third = next(n for n in captured.graph_module.graph.nodes if n.name == "getitem")
    assert str(third.args[0].target) == "aten.unbind.int"
    assert_expected_inline(
        "\n".join(offload(captured, "p_layers_0_w1_weight", "getitem")),
        """\
p_layers_0_w1_weight: it is an input or a constant
getitem: it does not fill its memory""",
    )


def test_a_copy_keeps_strides():
    value = torch.randn(3, 4, 5).transpose(0, 2)
    host = torch.ops.gt_passes.offload(value)
    back = torch.ops.gt_passes.reload(host, value.device)
    assert host.data_ptr() != value.data_ptr() != back.data_ptr()
    assert same_bits(torch.ops.gt_passes.wait_copy(back, host), value)
