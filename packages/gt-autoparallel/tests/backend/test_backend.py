"""The policy of ``autoparallel_backend``: recompute to a budget, overlap, one compiled graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.fx import GraphModule

from gt_autoparallel.backend import backend_passes
from gt_autoparallel.backend.recipe import OverlapCollectives, TagToMemoryBudget
from gt_config.node_keys import ResidencyAnnotation
from gt_passes import DescribeOnly, PassContext, PassManager, estimate_peak_bytes
from gt_passes.analysis.collectives import is_collective, is_wait
from gt_trace import TracedStep, read_annotation, trace_step
from gt_trace.testing import fake_world

functional = torch.ops._c10d_functional


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16, bias=False) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.sin(torch.relu(layer(x)) + 1)
        return x


class Blocks(nn.Module):
    """Each layer's activations are made inside it, where they may be recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(Layers()) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def traced() -> TracedStep:
    model = Blocks()

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(model(x).sum(), list(model.parameters()))

    return trace_step(step, module=model)(torch.empty(512, 16))


def recomputed(graph_module: GraphModule) -> list[str]:
    return [
        node.name
        for node in graph_module.graph.nodes
        if (tag := read_annotation(node, ResidencyAnnotation)) is not None
        and tag.residency == "recompute"
    ]


@pytest.mark.parametrize("budget", [None, 1 << 30])
def test_nothing_is_recomputed_within_the_budget(traced: TracedStep, budget: int | None) -> None:
    report = TagToMemoryBudget(budget_bytes=budget).run(
        traced.graph_module, PassContext.of_step(traced)
    )
    assert not report.changed
    assert recomputed(traced.graph_module) == []


def test_as_much_is_recomputed_as_the_budget_asks_for(traced: TracedStep) -> None:
    peak = estimate_peak_bytes(traced.graph_module)
    counts = []
    for excess in (1, 40_000):
        for node in traced.graph_module.graph.nodes:
            node.meta["custom"] = {
                key: value
                for key, value in (node.meta.get("custom") or {}).items()
                if key != ResidencyAnnotation.KEY
            }
        tagging = TagToMemoryBudget(budget_bytes=peak - excess, optimizer_state_copies=0)
        report = tagging.run(traced.graph_module, PassContext.of_step(traced))
        assert report.counts["bytes_freed"] >= excess
        assert "bytes_over_budget" not in report.counts
        counts.append(report.counts["tensors_recompute"])
    assert counts[0] == 1
    assert counts[1] > 1


def test_says_what_no_recomputation_can_free(traced: TracedStep) -> None:
    report = TagToMemoryBudget(budget_bytes=0).run(traced.graph_module, PassContext.of_step(traced))
    assert report.counts["bytes_over_budget"] > 0


def test_the_caps_and_choices_of_a_user_reach_the_passes() -> None:
    without = {each.name: each for each in backend_passes()}
    assert "reshard-after-forward" not in without
    passes = {
        each.name: each for each in backend_passes(bucket_cap_mib=25, reshard_after_forward=True)
    }
    assert [*passes.keys() - without.keys()] == ["reshard-after-forward"]
    for name in ("bucket-all-gathers", "bucket-reduce-scatters", "bucket-all-reduces"):
        assert passes[name].cap_mib == 25
    kept = [
        each.name for each in backend_passes(memory_budget_bytes=1, reshard_after_forward=False)
    ]
    assert "recompute-tagged" in kept
    assert "reshard-after-forward" not in kept


def test_the_recipe_keeps_a_budget_and_compiles_one_graph(traced: TracedStep) -> None:
    context = PassContext.of_step(traced)
    peak = estimate_peak_bytes(traced.graph_module)
    static = sum(p.numel() * 4 for p in Blocks().parameters())
    passes = backend_passes(memory_budget_bytes=peak - 40_000 + 2 * static, compiler=DescribeOnly())
    report = PassManager(passes, context=context).run(traced.graph_module)
    assert [record.name for record in report.records][-1] == "compile-whole-graph"
    calls = [n for n in traced.graph_module.graph.nodes if n.op == "call_function"]
    regions = [n for n in calls if "region" in str(n.target)]
    assert len(regions) == 1


# ---- overlap -------------------------------------------------------------------------------------


def collected(step: Callable[..., torch.Tensor], *args: torch.Tensor) -> tuple[GraphModule, bool]:
    traced = trace_step(step)(*args)
    report = OverlapCollectives().run(traced.graph_module, PassContext.of_step(traced))
    traced.graph_module.graph.lint()
    return traced.graph_module, report.changed


def short(graph_module: GraphModule) -> list[str]:
    """Operators in order; collectives as launch and wait."""
    names = []
    for node in graph_module.graph.nodes:
        if is_collective(node):
            names.append("launch")
        elif is_wait(node):
            names.append("wait")
        elif node.op == "call_function":
            names.append(node.target._schema.name.removeprefix("aten::"))
    return names


def test_launches_go_up_to_their_input_and_waits_stay() -> None:
    with fake_world(rank=0, world_size=4):
        group = dist.group.WORLD.group_name

        def step(x: torch.Tensor) -> torch.Tensor:
            a = torch.sin(x)
            b = torch.cos(x)
            gathered = functional.wait_tensor(functional.all_gather_into_tensor(a, 4, group))
            return gathered.sum() + b.sum()

        graph_module, changed = collected(step, torch.empty(4, 4))
    assert changed
    # sin ====launch==========wait
    #               cos
    assert short(graph_module)[:4] == ["sin", "launch", "cos", "wait"]


def test_launches_keep_their_order() -> None:
    with fake_world(rank=0, world_size=4):
        group = dist.group.WORLD.group_name

        def step(x: torch.Tensor) -> torch.Tensor:
            a = torch.sin(x)
            b = torch.cos(a)
            second = functional.wait_tensor(functional.all_reduce(b, "sum", group))
            first = functional.wait_tensor(functional.all_reduce(a, "sum", group))
            return first + second

        graph_module, changed = collected(step, torch.empty(4, 4))
    # The second launch needs nothing but a, yet other ranks launch it second.
    assert short(graph_module) == ["sin", "cos", "launch", "launch", "wait", "wait", "add"]
    assert changed


def test_a_launch_right_behind_its_input_stays() -> None:
    with fake_world(rank=0, world_size=4):
        group = dist.group.WORLD.group_name

        def step(x: torch.Tensor) -> torch.Tensor:
            a = torch.sin(x)
            return functional.wait_tensor(functional.all_reduce(a, "sum", group)) + x

        _, changed = collected(step, torch.empty(4, 4))
    assert not changed
