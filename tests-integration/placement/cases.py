"""What the workers of ``test_placed_training.py`` run: planned models against one whole model."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils._python_dispatch import TorchDispatchMode
from training_cases import Case

from gt_autoparallel import PlacementPlan, PlacementPrices, predicted_collectives, read_plan
from gt_autoparallel.graph.experts import expert_weight_layout
from gt_config import ExpertPlacement
from gt_config.node_keys import EpExchangeAnnotation
from gt_passes.analysis.collectives import is_collective
from gt_trace import read_annotation, trace_step
from gt_trainer._torch_internals import process_group_named
from gt_trainer.decoder.attention import attends_with_flex_attention, attention_mask_for
from gt_trainer.decoder.expert_regions import annotate_expert_regions
from gt_trainer.steps.captured_step import training_step
from gt_trainer.trainer import GraphTrainer

NUM_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedCase:
    """A debug model on four ranks, placed by a plan."""

    model: Case
    mode: str = "aot_fx_trace"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of ``--compile``."""

    memory_budget_gib: float | None = None
    """A tight one makes plans that shard parameters."""

    experts: ExpertPlacement = "any"
    """How the plan may place routed experts."""

    balanced_routing: bool = False
    """Whether routers are forced to send as many tokens to each expert."""

    def trainer(self, folder: str) -> GraphTrainer:
        """In this worker's process group."""
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size)
        config = self.model.build(self.mode, folder, options={"autoparallel": True, **self.options})
        config.compile = dataclasses.replace(
            config.compile,
            autoparallel_solver=dataclasses.replace(
                config.compile.autoparallel_solver,
                memory_budget_gib=self.memory_budget_gib,
                experts=self.experts,
            ),
        )
        config.debug.moe_force_load_balance = self.balanced_routing
        return GraphTrainer(config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a rank saw."""

    losses: tuple[tuple[float, float], ...]
    """Of each step: the placed model's over all ranks, and the whole model's."""

    first_gradient: tuple[float, str]
    """Largest relative error, in norm, of the first step, and the parameter that has it."""

    worst_gradient: tuple[float, str]
    """Likewise over all steps, in which Adam magnifies the rounding of those before."""

    worst_parameter: tuple[float, str]
    """Likewise after the last step."""

    num_sharded: int
    """Parameters of which the plan shards at least one dim."""

    num_sharded_experts: int
    """Of these, weights of routed experts."""

    expert_weights: frozenset[Placement]
    """How the first weight of routed experts is cut where they compute."""

    expert_axes: frozenset[str]
    """Mesh axes over which tokens travel to their experts."""

    num_exchanges: int
    """Exchanges of tokens in a step, as the plan predicts."""

    all_to_all_bytes: tuple[tuple[int, ...], tuple[int, ...]]
    """Of every all-to-all of the last step, by size: what went through this rank's, and what the
    plan predicts, for exchanges of tokens at balanced routing."""

    miscounted: tuple[str, ...]
    """Layers of experts whose tokens, as torchtitan sums them to balance routing, are not those of
    the whole model."""

    unpredicted: tuple[str, ...]
    """Collectives of the traced step that the plan did not predict, and the reverse."""


def assert_agrees(found: Sequence[Found], *, tolerance: float) -> None:
    """Losses, gradients and parameters are equal on every rank, and collectives as predicted."""
    for each in found:
        for loss, expected in each.losses:
            assert abs(loss - expected) <= tolerance * abs(expected), each.losses
        assert each.first_gradient[0] < tolerance, each.first_gradient
        assert each.worst_gradient[0] < tolerance, each.worst_gradient
        assert each.worst_parameter[0] < tolerance, each.worst_parameter
        assert each.unpredicted == (), each.unpredicted


def compare_with_whole_model(case: PlacedCase, folder: str) -> Found:
    """Five steps of the placed model on four ranks, and of the whole model on each of them."""
    trainer = case.trainer(folder)
    placed = trainer.model_parts[0]
    whole = whole_model(trainer, placed)
    # Adam moves an element whose gradient is all rounding by a whole step; not with such an eps. With
    # 1e-8, 99.6 % of the worst parameter's squared error (1.1e-5 in norm) lay in the 0.6 % of its
    # elements whose gradients were below a thousandth of the tensor's; the others were at 6e-7.
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-6) for m in (placed, whole)]
    losses: list[tuple[float, float]] = []
    errors: list[tuple[float, str]] = []
    launched = RecordedAllToAlls()
    for step in range(NUM_STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with launched if step == NUM_STEPS - 1 else nullcontext():
            loss = placed_pass(trainer, step)
        expected = whole_pass(trainer, whole, step)
        losses.append((loss, expected))
        errors.append(worst_error(gradients(placed), gradients(whole)))
        for optimizer in optimizers:
            optimizer.step()
    plan = written_plan(folder)
    planned = [c for c in predicted_collectives(plan) if c.kind == "all_to_all"]
    exchanges = [c for c in planned if c.purpose == "token exchange"]
    sharded = [
        name
        for name, parameter in placed.named_parameters()
        if isinstance(parameter, DTensor) and any(p.is_shard() for p in parameter.placements)
    ]
    found = Found(
        losses=tuple(losses),
        first_gradient=errors[0],
        worst_gradient=max(errors),
        worst_parameter=worst_error(
            dict(placed.named_parameters()), dict(whole.named_parameters())
        ),
        num_sharded=len(sharded),
        num_sharded_experts=sum(".routed_experts." in name for name in sharded),
        expert_weights=frozenset(
            placement
            for node in plan.graph.of_kind("experts")
            for placement in expert_weight_layout(node, plan.options[node.index])
        ),
        expert_axes=frozenset(each.axis for each in exchanges),
        num_exchanges=len(exchanges),
        all_to_all_bytes=(
            tuple(sorted(launched.num_bytes)),
            tuple(sorted(each.num_bytes for each in planned)),
        ),
        miscounted=tuple(miscounted_experts(trainer, whole)),
        unpredicted=tuple(unpredicted_collectives(trainer, folder)) if dist.get_rank() == 0 else (),
    )
    trainer.close()
    return found


def miscounted_experts(trainer: GraphTrainer, whole: nn.Module) -> Iterator[str]:
    """Layers whose counts, summed as ``torchtitan/components/optimizer`` does, are others."""
    dims = trainer.parallel_dims
    summed = ["tp", "loss"] if dims.ep_enabled and dims.tp_enabled else ["loss"]
    expected = dict(whole.named_buffers())
    for name, buffer in trainer.model_parts[0].named_buffers():
        if name.endswith(".tokens_per_expert_E"):
            counts = buffer.clone()
            for axis in summed:
                dist.all_reduce(counts, group=dims.get_mesh(axis).get_group())
            if not torch.equal(counts, expected[name]):
                yield f"{name}: {counts.tolist()}, and {expected[name].tolist()}"


class RecordedAllToAlls(TorchDispatchMode):
    """Counts the bytes of every all-to-all that is launched inside."""

    supports_higher_order_operators = True
    """FlexAttention's, which launch none."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: list[int] = []
        """Of each, the larger of what goes in and what comes out."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            self.num_bytes.append(max(args[0].nbytes, result.nbytes))
        return result


def whole_model(trainer: GraphTrainer, placed: nn.Module) -> nn.Module:
    """The same model on one device, with the placed one's weights."""
    model: Any = trainer.model_config.build()
    model.init_weights(buffer_device=None)
    with torch.no_grad():
        sources = dict(placed.named_parameters())
        for name, parameter in model.named_parameters():
            parameter.copy_(full(sources[name]))
    return model.train()


def global_batch(
    trainer: GraphTrainer, step: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, labels and positions of all ranks: documents that differ from step to step."""
    mesh = trainer.parallel_dims.get_mesh("batch")
    training = trainer.config.training
    shape = (training.local_batch_size * mesh.size(), training.seq_len + 1)
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, trainer.model_config.vocab_size, shape, generator=generator)
    positions = torch.arange(training.seq_len) % (training.seq_len // 2 + 1 - step % NUM_STEPS)
    return tokens[:, :-1], tokens[:, 1:], positions.expand(shape[0], -1).contiguous()


def placed_inputs(
    trainer: GraphTrainer, step: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's part of the batch."""
    mesh = trainer.parallel_dims.get_mesh("batch")
    return tuple(
        each.chunk(mesh.size())[mesh.get_local_rank()].contiguous()
        for each in global_batch(trainer, step)
    )


def placed_pass(trainer: GraphTrainer, step: int) -> float:
    tokens, labels, positions = placed_inputs(trainer, step)
    num_tokens = torch.tensor(global_batch(trainer, step)[1].numel())
    loss = trainer.forward_backward_step(
        input_dict={"input": tokens, "positions": positions},
        labels=labels,
        global_valid_tokens=num_tokens,
    ).detach()
    dist.all_reduce(loss, group=trainer.parallel_dims.get_mesh("batch").get_group())
    return loss.item()


def whole_pass(trainer: GraphTrainer, whole: Any, step: int) -> float:
    tokens, labels, positions = global_batch(trainer, step)
    mask = attention_mask_for(trainer.model_parts[0], positions)
    if attends_with_flex_attention(trainer.model_config):
        mask = whole.get_attention_masks(positions)
    prediction = whole(tokens, positions=positions, attention_masks=mask)
    loss, _ = trainer.loss_fn(prediction, labels, torch.tensor(labels.numel()))
    loss.backward()
    return loss.item()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def worst_error(
    found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]
) -> tuple[float, str]:
    """The largest relative error in norm."""
    assert set(found) == set(wanted)
    return max((relative_error(full(found[name]), wanted[name]), name) for name in wanted)


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    with torch.no_grad():
        return float((found - wanted).norm() / wanted.norm())


def full(tensor: torch.Tensor) -> torch.Tensor:
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def unpredicted_collectives(trainer: GraphTrainer, folder: str) -> list[str]:
    """Collectives of the step as captured, before any pass, against those of the plan."""
    parameters = trainer.model_parts[0].parameters()
    mesh = next(each.device_mesh for each in parameters if isinstance(each, DTensor))
    tokens, labels, positions = placed_inputs(trainer, 0)
    inputs, labels, extra = trainer.post_dataloading_process(
        {"input": tokens, "positions": positions}, labels
    )
    model = trainer.model_parts[0]
    with annotate_expert_regions(model):
        traced = trace_step(training_step(model, trainer.loss_fn), module=model)(
            inputs, labels, torch.tensor(labels.numel()), extra
        )
    found = traced_collectives(traced.graph_module.graph, mesh)
    predicted = predicted_of(written_plan(folder))
    return [
        *(f"not predicted: {each}" for each in (found - predicted).elements()),
        *(f"not traced: {each}" for each in (predicted - found).elements()),
    ]


def written_plan(folder: str) -> PlacementPlan:
    """What rank 0 planned and wrote."""
    return read_plan(Path(folder) / "placement.json", prices=PlacementPrices())


def predicted_of(plan: PlacementPlan) -> Counter[tuple[str, str, int | str]]:
    return Counter(
        (c.kind, c.axis, c.num_bytes if c.purpose != "token exchange" else "routed")
        for c in predicted_collectives(plan)
    )


_KINDS = MappingProxyType(
    {
        "all_gather_into_tensor": "all_gather",
        "reduce_scatter_tensor": "reduce_scatter",
        "all_reduce": "all_reduce",
        "all_to_all_single": "all_to_all",
    }
)


def traced_collectives(
    graph: torch.fx.Graph, mesh: DeviceMesh
) -> Counter[tuple[str, str, int | str]]:
    """(kind, axis, bytes) of each collective; "routed" where bytes depend on routing."""
    names = mesh.mesh_dim_names
    assert names is not None
    # Experts may be over all axes together. By ranks, as DTensor takes a mesh that an earlier test
    # made, with groups of its own, for an equal one.
    axes_of_ranks = {own_ranks(mesh, *range(mesh.ndim)): " x ".join(names)}
    axes_of_ranks |= {own_ranks(mesh, axis): name for axis, name in enumerate(names)}
    found: Counter[tuple[str, str, int | str]] = Counter()
    for node in graph.nodes:
        if not is_collective(node) or node.meta["val"].ndim == 0:
            continue  # a scalar is the loss, which no plan has
        sizes = [
            value.numel() * value.element_size()
            for value in (node.args[0].meta["val"], node.meta["val"])
        ]
        is_routed = read_annotation(node, EpExchangeAnnotation) is not None
        num_bytes = "routed" if is_routed else max(sizes)
        kind = _KINDS[node.target._schema.name.partition("::")[2]]
        ranks = dist.get_process_group_ranks(process_group_named(node.args[-1]))
        found[kind, axes_of_ranks[tuple(ranks)], num_bytes] += 1
    return found


def own_ranks(mesh: DeviceMesh, *axes: int) -> tuple[int, ...]:
    """Of the group that has this rank, along some axes together."""
    at: tuple[int | slice, ...] = tuple(
        slice(None) if axis in axes else coordinate
        for axis, coordinate in enumerate(mesh.get_coordinate() or ())
    )
    return tuple(mesh.mesh[at].flatten().tolist())
