"""Operators of a captured step are counted under the layers that they belong to."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from gt_passes import (
    CompileWholeGraph,
    DescribeOnly,
    PassContext,
    PassManager,
    RecomputeTagged,
    TagSavedTensors,
)
from gt_trace import phase, trace_step
from gt_trainer.steps.layer_summary import layer_counts, layer_summary


def test_operators_are_counted_by_layer_and_phase():
    layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU()) for _ in range(2))
    model = nn.ModuleDict({"layers": layers, "norm": nn.LayerNorm(4, bias=False)})

    def step(x: torch.Tensor):
        for layer in layers:
            x = layer(x)
        x = model["norm"](x)
        with phase("loss"):
            loss = x.sum()
        return loss, torch.autograd.grad(loss, list(model.parameters()))

    graph_module = trace_step(step, module=model)(torch.rand(2, 4)).graph_module
    counts = layer_counts(graph_module)
    assert [*counts] == ["layers.0", "layers.1", "norm", "(loss)", "(backward)"]
    assert counts["layers.0"]["forward"] == counts["layers.1"]["forward"] == 4
    assert counts["(loss)"] == {"loss": 2}
    num_operators = sum(
        node.op not in ("placeholder", "output") for node in graph_module.graph.nodes
    )
    assert sum(sum(each.values()) for each in counts.values()) == num_operators


def test_a_summary_tells_kinds_and_what_is_left_to_the_backward_before_and_after_passes():
    layers = nn.ModuleList(
        nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2)), nn.SiLU()) for _ in range(2)
    )
    model = nn.ModuleDict({"layers": layers})

    def step(x: torch.Tensor):
        for layer in layers:
            x = layer(x)
        return torch.autograd.grad(x.sum(), list(model.parameters()))

    traced = trace_step(step, module=model)(torch.rand(2, 4))
    manager = PassManager(
        [
            TagSavedTensors(policy="full_recompute"),
            RecomputeTagged(),
            CompileWholeGraph(compiler=DescribeOnly()),
        ],
        context=PassContext.of_step(traced),
        summarize=layer_summary,
    )
    report = manager.run(traced.graph_module)
    before, after = report.summary_before, report.summary_after
    assert isinstance(before, dict)
    assert isinstance(after, dict)
    of_both = {"views": 9, "elementwise": 2}
    num_bytes = 2 * 4 * 4
    assert before["layers.0"] == {**of_both, "matrix products": 5, "saved bytes": 3 * num_bytes}
    assert after["layers.0"] == {
        **of_both,
        "matrix products": 7,
        "saved bytes": num_bytes,
        "recomputed bytes": 2 * num_bytes,
    }


def test_a_collective_is_behind_products_if_one_runs_before_its_wait():
    def step(x: torch.Tensor, weight: torch.Tensor):
        c10d = torch.ops._c10d_functional
        behind = c10d.all_reduce(x, "sum", "group")
        product = x @ weight
        alone = c10d.wait_tensor(c10d.all_reduce(product, "sum", "group"))
        return c10d.wait_tensor(behind) + alone

    graph_module = make_fx(step, tracing_mode="fake")(torch.rand(4, 4), torch.rand(4, 4))
    assert layer_summary(graph_module) == {
        "(no phase)": {
            "collectives": 2,
            "collective bytes": 2 * 64,
            "collectives behind products": 1,
            "matrix products": 1,
            "waits": 2,
            "elementwise": 1,
        }
    }


def test_a_copy_between_devices_is_another_kind_than_a_cast():
    def step(x):
        y = x.to(torch.bfloat16)
        return x.to("cpu"), y.to(torch.float64)

    with FakeTensorMode():
        x = torch.empty(4, device="cuda")
    graph_module = make_fx(step)(x)
    assert layer_summary(graph_module) == {"(no phase)": {"elementwise": 2, "host copies": 1}}
