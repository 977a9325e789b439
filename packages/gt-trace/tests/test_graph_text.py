"""The readable form of a graph."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh

from gt_config.node_keys import EpRegionAnnotation, FsdpCollectiveAnnotation
from gt_trace import annotate, collective_counts, graph_text, trace_step
from gt_trace.testing import fake_world


def test_text_groups_nodes_by_phase_and_module() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.GELU())
    text = graph_text(trace_step(lambda x: model(x), module=model)(torch.ones(1, 2)).graph_module)
    assert_expected_inline(
        text,
        """\
input p_0_weight: f32[2, 2]
input a_x: f32[1, 2]
# forward 0
    t: f32[2, 2] = aten.t.default(p_0_weight)
    mm: f32[1, 2] = aten.mm.default(a_x, t)
# forward 1
    gelu: f32[1, 2] = aten.gelu.default(mm)
return [gelu]
""",
    )


def test_source_lines_are_given_without_folders() -> None:
    model = nn.Sequential(nn.ReLU())
    graph_module = trace_step(lambda x: model(x), module=model)(torch.ones(1)).graph_module
    text = graph_text(graph_module, stack_traces=True)
    assert "    # activation.py:" in text
    assert "/" not in text


def test_collectives_are_marked_and_counted() -> None:
    with fake_world(rank=0, world_size=2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        unshard = FsdpCollectiveAnnotation(
            kind="unshard", parameter_names=("a.w", "b.w"), mesh_axis="dp"
        )

        def step(w: torch.Tensor) -> torch.Tensor:
            with annotate(unshard), annotate(EpRegionAnnotation(kind="compute")):
                return funcol.all_reduce(w, "sum", mesh.get_group())

        graph_module = trace_step(step)(torch.ones(2)).graph_module
    mark = "  # fsdp unshard a.w, b.w over dp; ep compute"
    assert sum(line.endswith(mark) for line in graph_text(graph_module).splitlines()) == 2
    assert collective_counts(graph_module) == {"all_reduce": 1}
