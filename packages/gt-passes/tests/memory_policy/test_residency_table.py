"""The table of what is kept, by layer."""

from __future__ import annotations

from expecttest import assert_expected_inline
from memory_models import Captured, Mlp, capture_stack, run
from torch import nn

from gt_config import MemoryPolicy
from gt_passes import (
    CanonicalizeViews,
    OffloadTagged,
    RecomputeTagged,
    RemoveDeadCode,
    TagSavedTensors,
)
from gt_passes.memory_policy.residency_table import residency_by_layer, residency_table


def after(policy: MemoryPolicy, *layers: nn.Module) -> Captured:
    captured = capture_stack(list(layers), dim=128)
    tag = TagSavedTensors(policy=policy, offload_min_bytes=1)
    run(captured, RemoveDeadCode(), CanonicalizeViews(), tag, RecomputeTagged(), OffloadTagged())
    return captured


def test_without_a_policy_all_that_the_backward_reads_is_saved():
    captured = capture_stack([Mlp(128)], dim=128)
    run(captured, RemoveDeadCode(), CanonicalizeViews())
    outside, layer = sorted(residency_by_layer(captured.graph_module), key=lambda row: row.layer)
    assert (layer.layer, layer.num_tensors) == ("layers.0", {"save": 3})
    assert layer.num_bytes == {"save": 8 * 4 * (256 + 256 + 128)}
    assert layer.bytes_by_operator == {
        "aten.mm": 8 * 4 * (256 + 128),
        "aten.silu": 8 * 4 * 256,
    }
    assert (outside.layer, outside.num_tensors) == ("", {"save": 1})


def test_layers_alike_share_a_line():
    captured = after("selective", Mlp(128), Mlp(128), nn.Sequential(Mlp(128), Mlp(128)))
    assert_expected_inline(
        residency_table(captured.graph_module),
        """\
layer                                    saved MiB      recomputed MiB       offloaded MiB  most kept by
layers.0 to layers.1, each                0.01 (2)            0.01 (1)            0.00 (0)  aten.mm
layers.2                                  0.02 (4)            0.02 (2)            0.00 (0)  aten.mm
(outside)                                 0.00 (1)            0.00 (0)            0.00 (0)  aten.ones_like
total                                     0.05 (9)            0.03 (4)            0.00 (0)  aten.mm, aten.ones_like""",
    )


def test_offloaded_tensors_count_once():
    captured = after("offload", *(Mlp(128) for _ in range(4)))
    assert_expected_inline(
        residency_table(captured.graph_module),
        """\
layer                                    saved MiB      recomputed MiB       offloaded MiB  most kept by
layers.0 to layers.2, each                0.00 (0)            0.01 (1)            0.01 (2)  aten.mm
layers.3                                  0.01 (2)            0.01 (1)            0.00 (0)  aten.mm
(outside)                                 0.00 (1)            0.00 (0)            0.00 (0)  aten.ones_like
total                                     0.01 (3)            0.03 (4)            0.04 (6)  aten.mm, aten.ones_like""",
    )


def test_what_a_pass_refused_counts_as_saved():
    # The last layer would come back from host memory at once.
    rows = residency_by_layer(after("offload", Mlp(128), Mlp(128)).graph_module)
    by_layer = {row.layer: row.num_tensors for row in rows}
    assert by_layer["layers.1"] == {"save": 2, "recompute": 1}
    assert by_layer["layers.0"] == {"offload": 2, "recompute": 1}


def test_layers_are_what_the_pattern_says():
    captured = after("full_recompute", Mlp(128), Mlp(128))
    rows = residency_by_layer(captured.graph_module, layers="stack.*")
    assert [row.layer for row in rows] == [""]
