"""Sums of the parts of a gradient are nobody's bucket: they stay in front of what reduces it."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph

from gt_config.node_keys import FsdpCollectiveAnnotation, FsdpCollectiveKind
from gt_passes.analysis.fsdp_collective import fsdp_collective
from gt_trace import write_annotation


@pytest.mark.parametrize(
    ("kind", "is_fsdp"), [("unshard", True), ("reduce_grad", True), ("sum_parts", False)]
)
def test_gathers_and_reductions_are_fsdps(kind: FsdpCollectiveKind, is_fsdp: bool) -> None:
    graph = Graph()
    node = graph.call_function(
        torch.ops._c10d_functional.wait_tensor.default, (graph.placeholder("x"),)
    )
    assert fsdp_collective(node) is None
    annotation = FsdpCollectiveAnnotation(kind=kind, parameter_names=("norm",), mesh_axis="axis")
    write_annotation(node, annotation)
    assert fsdp_collective(node) == (annotation if is_fsdp else None)
