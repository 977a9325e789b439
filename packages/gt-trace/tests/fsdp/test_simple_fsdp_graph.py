"""What a capture of a sharded model holds, seen from one rank of a world that does not exist."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from fsdp_cases import Experts, Language, Mixture, data_parallel_names, loss_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.fx import Node
from torch.utils.checkpoint import checkpoint

from gt_config.node_keys import FsdpCollectiveAnnotation
from gt_trace import (
    CaptureError,
    TracedStep,
    collective_counts,
    graph_text,
    read_annotation,
    trace_step,
)
from gt_trace.fsdp import MixedPrecision, ShardingMode, gathered, shard
from gt_trace.testing import fake_world


@pytest.fixture(autouse=True)
def _world_of_four() -> Iterator[None]:
    with fake_world(rank=1, world_size=4):
        yield


def mesh_for(mode: ShardingMode) -> DeviceMesh:
    extents = (2, 2) if mode == "hybrid_shard" else (4,)
    return init_device_mesh("cpu", extents, mesh_dim_names=data_parallel_names(mode))


def gradient_step(model: nn.Module) -> Callable[[torch.Tensor], Any]:
    def step(x: torch.Tensor) -> Any:
        return torch.autograd.grad(model(x).sum(), list(model.parameters()))

    return step


def language_step(model: nn.Module) -> TracedStep:
    def step(tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        return torch.autograd.grad(loss_of(model, tokens, labels), list(model.parameters()))

    tokens = torch.zeros(2, 5, dtype=torch.int64)
    return trace_step(step, module=model)(tokens, tokens)


_LAST_VIEW = re.compile(r" +(view_\d): .* = aten\.view\.default\((\w+), .*\n.*return \[\1\]")


def text(traced: TracedStep, mesh: DeviceMesh) -> str:
    """The graph with process groups by the names of their mesh axes."""
    result = graph_text(traced.graph_module)
    for axis in mesh.mesh_dim_names or ():
        result = result.replace(repr(mesh.get_group(axis).group_name), axis)
    # From torch 2.12 on, a gradient that leaves a DTensor is a view of it.
    return _LAST_VIEW.sub(r"return [\2]", result)


def collectives(traced: TracedStep) -> list[tuple[str, str, tuple[str, ...], str]]:
    """Operator, kind, parameter names and axis of each collective, in execution order."""
    found: list[tuple[str, str, tuple[str, ...], str]] = []
    for node in traced.graph_module.graph.nodes:
        if _is_communication(node) and "wait" not in str(node.target):
            annotation = read_annotation(node, FsdpCollectiveAnnotation)
            assert annotation is not None, node.format_node()
            operator = str(node.target).split(".")[1]
            found.append(
                (operator, annotation.kind, annotation.parameter_names, annotation.mesh_axis)
            )
    return found


def _is_communication(node: Node) -> bool:
    return str(node.target).startswith("_c10d_functional")


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 5, bias=False))


def test_parameters_listed_outside_of_the_step_get_the_same_graph_or_are_refused() -> None:
    model = nn.Linear(8, 8)
    shard(model, mesh_for("shard"), mode="shard")
    parameters, x = list(model.parameters()), torch.rand(2, 8)

    def step(x: torch.Tensor) -> Any:
        return torch.autograd.grad(model(x).sum(), parameters, allow_unused=True)

    inside = trace_step(gradient_step(model), module=model)(x)
    outside = trace_step(step, module=model)(x)
    assert graph_text(outside.graph_module) == graph_text(inside.graph_module)

    def local_step(x: torch.Tensor) -> Any:
        stored: Any = parameters[0]
        loss = model(x).sum() + stored.to_local().sum()
        return torch.autograd.grad(loss, parameters, allow_unused=True)

    with pytest.raises(CaptureError, match=r"gradients would be lost.*\n  parameter weight$"):
        trace_step(local_step, module=model)(x)


def test_golden_of_shard() -> None:
    model, mesh = linear(), mesh_for("shard")
    shard(model, mesh, mode="shard")
    traced = trace_step(gradient_step(model), module=model)(torch.ones(3, 2))
    assert_expected_inline(
        text(traced, mesh),
        """\
input p_0_weight: f32[2, 2]
input a_x: f32[3, 2]
# forward 0
    view: f32[2, 2] = aten.view.default(p_0_weight, [2, 2])
    all_gather_into_tensor: f32[8, 2] = _c10d_functional.all_gather_into_tensor.default(view, 4, shard)  # fsdp unshard 0.weight over shard
    wait_tensor: f32[8, 2] = _c10d_functional.wait_tensor.default(all_gather_into_tensor)  # fsdp unshard 0.weight over shard
    slice_1: f32[5, 2] = aten.slice.Tensor(wait_tensor, 0, 0, 5)  # fsdp unshard 0.weight over shard
    t: f32[2, 5] = aten.t.default(slice_1)
    mm: f32[3, 5] = aten.mm.default(a_x, t)
# forward
    sum_1: f32[] = aten.sum.default(mm)
    ones_like: f32[] = aten.ones_like.default(sum_1, pin_memory=False, memory_format=torch.preserve_format)
# backward
    expand: f32[3, 5] = aten.expand.default(ones_like, [3, 5])
# backward 0
    t_1: f32[5, 3] = aten.t.default(expand)
    mm_1: f32[5, 2] = aten.mm.default(t_1, a_x)
    t_2: f32[2, 5] = aten.t.default(mm_1)
    t_3: f32[5, 2] = aten.t.default(t_2)
    new_zeros: f32[3, 2] = aten.new_zeros.default(t_3, [3, 2], pin_memory=False)  # fsdp reduce_grad 0.weight over shard
    cat: f32[8, 2] = aten.cat.default([t_3, new_zeros])  # fsdp reduce_grad 0.weight over shard
    reduce_scatter_tensor: f32[2, 2] = _c10d_functional.reduce_scatter_tensor.default(cat, 'sum', 4, shard)  # fsdp reduce_grad 0.weight over shard
    wait_tensor_1: f32[2, 2] = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)  # fsdp reduce_grad 0.weight over shard
    div: f32[2, 2] = aten.div.Tensor(wait_tensor_1, 4.0)  # fsdp reduce_grad 0.weight over shard
return [div]
""",
    )


def test_golden_of_replicate() -> None:
    model, mesh = linear(), mesh_for("replicate")
    shard(model, mesh, mode="replicate")
    traced = trace_step(gradient_step(model), module=model)(torch.ones(3, 2))
    assert_expected_inline(
        text(traced, mesh),
        """\
input p_0_weight: f32[5, 2]
input a_x: f32[3, 2]
# forward 0
    view: f32[5, 2] = aten.view.default(p_0_weight, [5, 2])
    view_1: f32[5, 2] = aten.view.default(view, [5, 2])  # fsdp unshard 0.weight over replicate
    t: f32[2, 5] = aten.t.default(view_1)
    mm: f32[3, 5] = aten.mm.default(a_x, t)
# forward
    sum_1: f32[] = aten.sum.default(mm)
    ones_like: f32[] = aten.ones_like.default(sum_1, pin_memory=False, memory_format=torch.preserve_format)
# backward
    expand: f32[3, 5] = aten.expand.default(ones_like, [3, 5])
# backward 0
    t_1: f32[5, 3] = aten.t.default(expand)
    mm_1: f32[5, 2] = aten.mm.default(t_1, a_x)
    t_2: f32[2, 5] = aten.t.default(mm_1)
    t_3: f32[5, 2] = aten.t.default(t_2)
    all_reduce: f32[5, 2] = _c10d_functional.all_reduce.default(t_3, 'sum', replicate)  # fsdp reduce_grad 0.weight over replicate
    wait_tensor: f32[5, 2] = _c10d_functional.wait_tensor.default(all_reduce)  # fsdp reduce_grad 0.weight over replicate
    div: f32[5, 2] = aten.div.Tensor(wait_tensor, 4.0)  # fsdp reduce_grad 0.weight over replicate
return [div]
""",
    )


def test_golden_of_hybrid_shard_in_mixed_precision() -> None:
    model, mesh = linear(), mesh_for("hybrid_shard")
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(model, mesh, mode="hybrid_shard", mixed_precision=precision)
    traced = trace_step(gradient_step(model), module=model)(torch.ones(3, 2).bfloat16())
    assert_expected_inline(
        text(traced, mesh),
        """\
input p_0_weight: f32[2, 2]
input a_x: bf16[3, 2]
# forward 0
    view: f32[2, 2] = aten.view.default(p_0_weight, [2, 2])
    _to_copy: bf16[2, 2] = aten._to_copy.default(view, dtype=torch.bfloat16)  # fsdp unshard 0.weight over shard
    new_zeros: bf16[1, 2] = aten.new_zeros.default(_to_copy, [1, 2], pin_memory=False)  # fsdp unshard 0.weight over shard
    cat: bf16[3, 2] = aten.cat.default([_to_copy, new_zeros])  # fsdp unshard 0.weight over shard
    all_gather_into_tensor: bf16[6, 2] = _c10d_functional.all_gather_into_tensor.default(cat, 2, shard)  # fsdp unshard 0.weight over shard
    wait_tensor: bf16[6, 2] = _c10d_functional.wait_tensor.default(all_gather_into_tensor)  # fsdp unshard 0.weight over shard
    slice_1: bf16[5, 2] = aten.slice.Tensor(wait_tensor, 0, 0, 5)  # fsdp unshard 0.weight over shard
    t: bf16[2, 5] = aten.t.default(slice_1)
    mm: bf16[3, 5] = aten.mm.default(a_x, t)
# forward
    sum_1: bf16[] = aten.sum.default(mm)
    ones_like: bf16[] = aten.ones_like.default(sum_1, pin_memory=False, memory_format=torch.preserve_format)
# backward
    expand: bf16[3, 5] = aten.expand.default(ones_like, [3, 5])
# backward 0
    t_1: bf16[5, 3] = aten.t.default(expand)
    mm_1: bf16[5, 2] = aten.mm.default(t_1, a_x)
    t_2: bf16[2, 5] = aten.t.default(mm_1)
    t_3: bf16[5, 2] = aten.t.default(t_2)
    _to_copy_1: f32[5, 2] = aten._to_copy.default(t_3, dtype=torch.float32)  # fsdp reduce_grad 0.weight over shard
    new_zeros_1: f32[1, 2] = aten.new_zeros.default(_to_copy_1, [1, 2], pin_memory=False)  # fsdp reduce_grad 0.weight over shard
    cat_1: f32[6, 2] = aten.cat.default([_to_copy_1, new_zeros_1])  # fsdp reduce_grad 0.weight over shard
    reduce_scatter_tensor: f32[3, 2] = _c10d_functional.reduce_scatter_tensor.default(cat_1, 'sum', 2, shard)  # fsdp reduce_grad 0.weight over shard
    wait_tensor_1: f32[3, 2] = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)  # fsdp reduce_grad 0.weight over shard
    all_reduce: f32[3, 2] = _c10d_functional.all_reduce.default(wait_tensor_1, 'sum', replicate)  # fsdp reduce_grad 0.weight over replicate
    wait_tensor_2: f32[3, 2] = _c10d_functional.wait_tensor.default(all_reduce)  # fsdp reduce_grad 0.weight over replicate
    slice_2: f32[2, 2] = aten.slice.Tensor(wait_tensor_2, 0, 0, 2)  # fsdp reduce_grad 0.weight over shard
    div: f32[2, 2] = aten.div.Tensor(slice_2, 4.0)  # fsdp reduce_grad 0.weight over shard
return [div]
""",
    )


EXPECTED_COUNTS = {
    "shard": {"all_gather_into_tensor": 15, "reduce_scatter_tensor": 15},
    "replicate": {"all_reduce": 15},
    "hybrid_shard": {
        "all_gather_into_tensor": 15,
        "all_reduce": 15,
        "reduce_scatter_tensor": 15,
    },
}


@pytest.mark.parametrize("mode", ["shard", "replicate", "hybrid_shard"])
def test_each_parameter_is_gathered_and_reduced_once(mode: ShardingMode) -> None:
    # Seven parameters in each of two blocks, and one tied weight.
    model = Language(tied=True)
    shard(model, mesh_for(mode), mode=mode)
    assert collective_counts(language_step(model).graph_module) == EXPECTED_COUNTS[mode]


@pytest.mark.parametrize("mode", ["shard", "replicate", "hybrid_shard"])
def test_every_collective_says_what_it_is_for(mode: ShardingMode) -> None:
    model = Language(tied=True)
    shard(model, mesh_for(mode), mode=mode)
    traced = language_step(model)
    tied = ("embedding.weight", "head.weight")
    of_tied = [(o, k, a) for o, k, names, a in collectives(traced) if names == tied]
    gather = ("all_gather_into_tensor", "unshard", "shard")
    scatter = ("reduce_scatter_tensor", "reduce_grad", "shard")
    reduce = ("all_reduce", "reduce_grad", "replicate")
    assert (
        of_tied
        == {
            "shard": [gather, scatter],
            "replicate": [reduce],
            "hybrid_shard": [gather, scatter, reduce],
        }[mode]
    )
    for node in traced.graph_module.graph.nodes:
        if _is_communication(node):  # waits too
            assert read_annotation(node, FsdpCollectiveAnnotation) is not None


def test_a_prefix_leads_every_name() -> None:
    model = linear()
    shard(model, mesh_for("shard"), mode="shard", prefix="layers.3")
    traced = trace_step(gradient_step(model), module=model)(torch.ones(3, 2))
    assert {names for _, _, names, _ in collectives(traced)} == {("layers.3.0.weight",)}


def test_weights_tied_after_sharding_are_gathered_once_under_both_names() -> None:
    model = Language(tied=False)
    shard(model, mesh_for("shard"), mode="shard")
    model.embedding.weight = model.head.weight
    traced = language_step(model)
    assert collective_counts(traced.graph_module) == EXPECTED_COUNTS["shard"]
    assert ("embedding.weight", "head.weight") in {n for _, _, n, _ in collectives(traced)}


def test_experts_sharded_first_keep_their_own_axis_and_dim() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    flat = mesh._flatten("data")
    model = Mixture()
    shard(model.experts, mesh["inner"], mode="shard", shard_dim=1, prefix="experts")
    shard(model, flat, mode="shard")
    axis_of = {names[0]: axis for _, kind, names, axis in collectives(language_step(model)) if kind}
    assert axis_of == {
        "embedding.weight": "data",
        "experts.up": "inner",
        "experts.down": "inner",
        "head.weight": "data",
        "head.bias": "data",
    }
    assert model.experts.up.to_local().shape == (2, 2, 8)
    assert model.head.weight.to_local().shape == (4, 8)


def test_tensor_parallel_parameters_are_gathered_over_the_data_axis_only() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    shard(model, mesh["shard"], mode="shard")
    traced = trace_step(gradient_step(model), module=model)(torch.ones(3, 4))
    fsdp = [
        (str(n.target).split(".")[1], a.parameter_names[0], a.mesh_axis)
        for n in traced.graph_module.graph.nodes
        if _is_communication(n)
        and "wait" not in str(n.target)
        and (a := read_annotation(n, FsdpCollectiveAnnotation))
    ]
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert sorted(fsdp) == sorted(
        [("all_gather_into_tensor", n, "shard") for n in names]
        + [("reduce_scatter_tensor", n, "shard") for n in names]
    )


def test_one_rank_on_an_axis_needs_no_collective() -> None:
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("replicate", "shard"))
    model = linear()
    shard(model, mesh, mode="hybrid_shard")
    traced = trace_step(gradient_step(model), module=model)(torch.ones(3, 2))
    assert collective_counts(traced.graph_module) == {"all_reduce": 1}


def test_a_frozen_parameter_is_gathered_but_never_reduced() -> None:
    model = linear()
    model[0].weight.requires_grad_(False)
    shard(model, mesh_for("shard"), mode="shard")
    assert not model[0].weight.requires_grad

    def step(x: torch.Tensor) -> Any:
        return torch.autograd.grad(model(x).sum(), x)

    x = torch.ones(3, 2, requires_grad=True)
    traced = trace_step(step, module=model)(x)
    assert collective_counts(traced.graph_module) == {"all_gather_into_tensor": 1}


def test_forwards_inside_gathered_share_one_gather_and_one_reduction() -> None:
    model = linear()
    shard(model, mesh_for("shard"), mode="shard")

    def step(x: torch.Tensor) -> Any:
        with gathered(model):
            total = sum(model(chunk).sum() for chunk in x.split(1))
        return torch.autograd.grad(total, list(model.parameters()))

    traced = trace_step(step, module=model)(torch.ones(3, 2))
    assert collective_counts(traced.graph_module) == {
        "all_gather_into_tensor": 1,
        "reduce_scatter_tensor": 1,
    }


def test_separate_forwards_gather_anew() -> None:
    # As for microbatches: nothing whole outlives a forward.
    model = linear()
    shard(model, mesh_for("shard"), mode="shard")

    def step(x: torch.Tensor) -> Any:
        total = sum(model(chunk).sum() for chunk in x.split(1))
        return torch.autograd.grad(total, list(model.parameters()))

    traced = trace_step(step, module=model)(torch.ones(3, 2))
    assert collective_counts(traced.graph_module) == {
        "all_gather_into_tensor": 3,
        "reduce_scatter_tensor": 3,
    }


def test_activation_checkpointing_gathers_again_in_backward() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = Experts(2, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.experts, x, use_reentrant=False)

    model = Checkpointed()
    shard(model, mesh_for("shard"), mode="shard")
    traced = trace_step(gradient_step(model), module=model)(torch.ones(3, 1, 2))
    assert collective_counts(traced.graph_module) == {
        "all_gather_into_tensor": 4,
        "reduce_scatter_tensor": 2,
    }
