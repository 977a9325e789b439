"""What ranks run in the tests of placed models with FlexAttention: against one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from placed_model_cases import mesh_2d, output_layouts, shard_of, whole
from random_plans import random_plan
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils import _pytree as pytree

from gt_autoparallel._torch_internals import operator_name
from gt_autoparallel.apply import apply_plan
from gt_autoparallel.graph.capture import capture_placement_graph
from gt_autoparallel.graph.layouts import MeshShape, short_text
from gt_autoparallel.graph.placement_graph import PlacementNode, Value
from gt_autoparallel.plan.placement_plan import PlacementPlan
from gt_trace import flex_attention_on_cpu, trace_step

BATCH, HEADS, KEYS, LENGTH, WIDTH, BLOCK = 4, 4, 2, 8, 4, 4


class GroupedAttention(nn.Module):
    """Fewer key-value heads than heads, a learned bias for each head, documents."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Linear(HEADS * WIDTH, HEADS * WIDTH, bias=False)
        self.keys = nn.Linear(HEADS * WIDTH, 2 * KEYS * WIDTH, bias=False)
        self.out = nn.Linear(HEADS * WIDTH, HEADS * WIDTH, bias=False)
        self.of_head = nn.Parameter(torch.randn(HEADS))
        self.of_distance = nn.Parameter(torch.randn(HEADS, LENGTH))

    def forward(self, x: torch.Tensor, mask: BlockMask) -> torch.Tensor:
        q = self.queries(x).unflatten(2, (HEADS, WIDTH)).transpose(1, 2)
        k, v = self.keys(x).unflatten(2, (2, KEYS, WIDTH)).transpose(1, 3).unbind(2)

        def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return s + self.of_head[h] * self.of_distance[h, (q_idx - kv_idx).abs()]

        out: Any = flex_attention(q, k, v, score_mod=score, block_mask=mask, enable_gqa=True)
        return x + self.out(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([GroupedAttention(), GroupedAttention()])

    def forward(self, x: torch.Tensor, mask: BlockMask) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x


def model() -> Model:
    torch.manual_seed(3)
    return Model()


def batch(seed: int) -> tuple[torch.Tensor, BlockMask]:
    """Activations, and the mask of their documents."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(BATCH, LENGTH, HEADS * WIDTH, generator=generator)
    starts = torch.rand(BATCH, LENGTH, generator=generator) < 0.3
    return x, _mask_of(starts.int().cumsum(1))


def _mask_of(documents: torch.Tensor) -> BlockMask:
    def within(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (documents[b, q] == documents[b, k])

    return create_block_mask(
        within, documents.shape[0], None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What a rank saw of some plans."""

    problems: tuple[str, ...]
    ways: frozenset[str]
    """In which layouts queries and keys of FlexAttention were, over all plans."""

    num_run_again: int
    """How often FlexAttention ran once more in a backward."""


def compare_random_plans_of_attention(seeds: list[int]) -> Compared:
    """Outputs and gradients of random plans, run eagerly and captured, on unseen documents."""
    with flex_attention_on_cpu():
        return _compare(seeds)


def _compare(seeds: list[int]) -> Compared:
    mesh, reference = mesh_2d(), model()
    graph = capture_placement_graph(reference, batch(0))
    problems: list[str] = []
    ways: set[str] = set()
    num_run_again = 0
    for seed in seeds:
        placed = model()
        plan = random_plan(placed, graph, MeshShape.of(mesh), seed=seed, recomputes=seed % 2 == 1)
        apply_plan(placed, plan, mesh)
        (layout,) = output_layouts(plan)
        ways |= _ways(plan)
        num_run_again += sum(_is_attention(graph.nodes[index]) for index in plan.recomputed)

        def step(x: Any, mask: Any, tangent: Any, placed: nn.Module = placed) -> Any:
            out = placed(x, mask)
            parameters = list(placed.parameters())
            return out.detach(), torch.autograd.grad(out, parameters, tangent)

        tangent = torch.randn(BATCH, LENGTH, HEADS * WIDTH, generator=_generator(seed))
        local_tangent = shard_of(tangent, layout, mesh)
        captured = trace_step(step, module=placed)(*local(plan, mesh, batch(0)), local_tangent)
        inputs = batch(seed + 1)
        expected = reference(*inputs)
        gradients = torch.autograd.grad(expected, list(reference.parameters()), tangent)
        wanted = dict(zip(dict(reference.named_parameters()), gradients, strict=True))
        for how, run in (("eager", step), ("captured", captured.bind(placed))):
            out, found = run(*local(plan, mesh, inputs), local_tangent)
            differences = {"output": _error(whole(out, layout, mesh), expected)}
            for name, gradient in zip(wanted, found, strict=True):
                assert isinstance(gradient, DTensor)
                differences[name] = _error(gradient.full_tensor(), wanted[name])
            problems += [
                f"seed {seed}, {how}: {name} is off by {error}"
                for name, error in differences.items()
                if error > 1e-5
            ]
    return Compared(problems=tuple(problems), ways=frozenset(ways), num_run_again=num_run_again)


def local(plan: PlacementPlan, mesh: DeviceMesh, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """This rank's shards of a batch."""
    assert plan.graph.interface is not None
    (args, _), spec = (inputs, {}), plan.graph.interface.input_spec
    shards = [
        leaf if planned.node is None else shard_of(leaf, plan.layout(Value(planned.node)), mesh)
        for planned, leaf in zip(
            plan.graph.interface.inputs, pytree.tree_leaves((args, {})), strict=True
        )
    ]
    args, _ = pytree.tree_unflatten(shards, spec)
    return tuple(args)


def _ways(plan: PlacementPlan) -> set[str]:
    return {
        " ".join(short_text(layout) for layout in plan.options[node.index].operands[:2])
        for node in plan.graph.of_kind("operator")
        if _is_attention(node)
    }


def _is_attention(node: PlacementNode) -> bool:
    return node.kind == "operator" and operator_name(node.target).startswith("higher_order.")


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    with torch.no_grad():
        return float((found - wanted).norm() / wanted.norm())
