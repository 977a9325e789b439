"""What ranks run in the tests of placed models: against the same model on one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from random_plans import random_plan
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from gt_autoparallel.apply import apply_plan
from gt_autoparallel.graph.capture import capture_placement_graph
from gt_autoparallel.graph.layouts import Layout, MeshShape
from gt_autoparallel.graph.placement_graph import Value
from gt_autoparallel.plan.placement_plan import PlacementPlan
from gt_autoparallel.plan.prediction import predicted_collectives
from gt_passes.analysis.collectives import is_collective
from gt_trace import trace_step

VOCABULARY, WIDTH, HEADS, BATCH, LENGTH = 16, 16, 4, 4, 8


class Block(nn.Module):
    """Attention and a gated feed-forward, with norms: what decoders are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.norm(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = (each.transpose(1, 2) for each in heads.unbind(2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """One block between a tied embedding and projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block()])
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, tokens: torch.Tensor, *, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embedding(tokens) + self.scale * torch.sin(positions.unsqueeze(-1))
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.head(self.norm(x)), "hidden": x}


def decoder() -> Decoder:
    torch.manual_seed(3)
    return Decoder()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
    return tokens, torch.arange(LENGTH, dtype=torch.float32).expand(BATCH, LENGTH).contiguous()


def mesh_2d() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))


def shard_of(tensor: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's shard of a tensor that every rank holds whole."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for axis, placement in enumerate(layout):
        if isinstance(placement, Shard):
            tensor = tensor.chunk(mesh.size(axis), dim=placement.dim)[coordinate[axis]]
    return tensor.contiguous()


def whole(tensor: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return DTensor.from_local(tensor, mesh, layout, run_check=False).full_tensor()


def compare_random_plans(seeds: list[int]) -> list[str]:
    """Outputs, gradients and collectives of random plans; what differs, in words."""
    mesh = mesh_2d()
    reference = decoder()
    tokens, positions = batch()
    graph = capture_placement_graph(reference, (tokens,), {"positions": positions})
    expected = reference(tokens, positions=positions)
    generator = torch.Generator().manual_seed(7)
    tangents = {
        name: torch.randn(value.shape, generator=generator) for name, value in expected.items()
    }
    torch.autograd.backward(list(expected.values()), list(tangents.values()))
    problems: list[str] = []
    for seed in seeds:
        model = decoder()
        plan = random_plan(model, graph, MeshShape.of(mesh), seed=seed, recomputes=seed % 2 == 0)
        apply_plan(model, plan, mesh)
        problems += [
            f"seed {seed}: {problem}"
            for problem in _differences(model, plan, mesh, reference, expected, tangents)
        ]
    return problems


def local_arguments(plan: PlacementPlan, mesh: DeviceMesh) -> tuple[torch.Tensor, torch.Tensor]:
    layouts = {str(n.target): plan.layout(Value(n.index)) for n in plan.graph.of_kind("input")}
    tokens, positions = batch()
    return (
        shard_of(tokens, layouts["tokens"], mesh),
        shard_of(positions, layouts["positions"], mesh),
    )


def output_layouts(plan: PlacementPlan) -> list[Layout]:
    return [plan.options[n.index].operands[0] for n in plan.graph.of_kind("output")]


def _differences(
    model: nn.Module,
    plan: PlacementPlan,
    mesh: DeviceMesh,
    reference: nn.Module,
    expected: dict[str, torch.Tensor],
    tangents: dict[str, torch.Tensor],
) -> list[str]:
    tokens, positions = local_arguments(plan, mesh)
    results = model(tokens, positions=positions)
    layouts = dict(zip(expected, output_layouts(plan), strict=True))
    torch.autograd.backward(
        [results[name] for name in expected],
        [shard_of(tangents[name], layouts[name], mesh) for name in expected],
    )
    problems = [
        f"output {name} is off by {_error(whole(results[name], layouts[name], mesh), expected[name])}"
        for name in expected
        if _error(whole(results[name], layouts[name], mesh), expected[name]) > 1e-5
    ]
    gradients = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        if parameter.grad.placements != parameter.placements:
            problems.append(f"gradient of {name} is placed as {parameter.grad.placements}")
        wanted = gradients[name].grad
        assert wanted is not None
        error = _error(parameter.grad.full_tensor(), wanted)
        if error > 1e-5:
            problems.append(f"gradient of {name} is off by {error}")
    return problems


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    with torch.no_grad():
        return float((found - wanted).norm() / wanted.norm())


def traced_collectives(graph: torch.fx.Graph, mesh: DeviceMesh) -> Counter[tuple[str, str, int]]:
    """(kind, axis, bytes) of each collective in a graph."""
    names = mesh.mesh_dim_names
    assert names is not None
    axis_of_group = {mesh.get_group(axis).group_name: names[axis] for axis in range(mesh.ndim)}
    kinds = {
        "all_gather_into_tensor": "all_gather",
        "reduce_scatter_tensor": "reduce_scatter",
        "all_reduce": "all_reduce",
        "all_to_all_single": "all_to_all",
    }
    found: Counter[tuple[str, str, int]] = Counter()
    for node in graph.nodes:
        if is_collective(node):
            kind = kinds[node.target._schema.name.partition("::")[2]]
            group = node.args[-1]
            sizes = [
                value.numel() * value.element_size()
                for value in (node.args[0].meta["val"], node.meta["val"])
            ]
            found[kind, axis_of_group[group], max(sizes)] += 1
    return found


def step_of(model: nn.Module) -> Callable[..., Any]:
    """One training step of a placed decoder."""

    def step(tokens: torch.Tensor, positions: torch.Tensor) -> Any:
        results = model(tokens, positions=positions)
        loss = sum(value.square().sum() for value in results.values())
        return loss, torch.autograd.grad(loss, list(model.parameters()))

    return step


def trace(model: nn.Module, plan: PlacementPlan, mesh: DeviceMesh) -> torch.fx.Graph:
    """That step, captured."""
    traced = trace_step(step_of(model), module=model)(*local_arguments(plan, mesh))
    return traced.graph_module.graph


def unpredicted_collectives(
    graph: torch.fx.Graph, plan: PlacementPlan, mesh: DeviceMesh
) -> list[str]:
    """How the collectives of a captured step differ from those that the plan predicts."""
    found = traced_collectives(graph, mesh)
    predicted = Counter((c.kind, c.axis, c.num_bytes) for c in predicted_collectives(plan))
    if found == predicted:
        return []
    return [f"collectives: unpredicted {found - predicted}, missing {predicted - found}"]
