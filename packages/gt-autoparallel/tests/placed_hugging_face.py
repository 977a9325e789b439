"""What workers run to place models of transformers, which know nothing of us, on four ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from placed_model_cases import mesh_2d, traced_collectives
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from gt_autoparallel.apply.apply_plan import apply_plan
from gt_autoparallel.find import PlacementRequest, find_placement
from gt_autoparallel.plan.placement_plan import PlacementPlan
from gt_autoparallel.plan.plan_encoding import decode_plan, encode_plan
from gt_autoparallel.plan.prediction import predicted_collectives
from gt_autoparallel.prices.costs import PlacementPrices
from gt_autoparallel.problem.constraints import Constraints
from gt_trace import trace_step

VOCABULARY, BATCH, TOKENS, WIDTH, NUM_STEPS = 32, 4, 8, 16, 5
BATCH_LAYOUT = (Shard(0), Replicate())


class Logits(nn.Module):
    """The model as a function from tokens to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=tokens).logits
        return logits


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceCase:
    """A model, and how it is trained."""

    build: Callable[[], nn.Module]
    memory_budget_bytes: int
    """Less than the fastest plan takes, so that parameters must be sharded."""

    optimizer: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


def gpt2() -> nn.Module:
    """Learned positions, weights that are stored transposed, tied embeddings."""
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=2, n_head=4, n_positions=16, use_cache=False,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, attn_implementation="eager",
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def qwen2() -> nn.Module:
    """Rotary positions, fewer heads of keys and values, biases on queries, keys and values."""
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def sgd(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


CASES = {
    # Not Adam: GPT-2's scores are (q . k + q . bias), of which softmax over keys does not see the
    # second term, so that the gradient of a key's bias is zero but for rounding, and Adam divides
    # it by its own size: two right runs part there by a step size at most.
    "gpt2": HuggingFaceCase(build=gpt2, memory_budget_bytes=140_000, optimizer=sgd),
    "qwen2": HuggingFaceCase(build=qwen2, memory_budget_bytes=78_000, optimizer=adam),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundOnModel:
    """What a rank saw. Errors are relative, in norm, with the name of the worst tensor."""

    losses: tuple[tuple[float, float], ...]
    """Of each step: the placed model's over all ranks, and the whole model's."""

    worst_gradient: tuple[float, str]
    """Over all steps."""

    worst_parameter: tuple[float, str]
    """After the last step."""

    num_sharded: int
    """Parameters of which the plan shards at least one dim."""

    unpredicted: Mapping[tuple[str, str, int], int]
    """By how much the traced step's number of collectives of each kind differs from the plan's
    prediction, where it does."""

    key_bias_share: float
    """Of GPT-2's first layer in the last step, the key's part of the gradient's norm."""


def compare_hugging_face(name: str) -> FoundOnModel:
    """Some steps of the placed model, and of the whole model on each rank."""
    case = CASES[name]
    mesh = mesh_2d()
    torch.manual_seed(0)
    whole = Logits(case.build()).train()
    placed = copy.deepcopy(whole)
    plan = place(placed, mesh, case.memory_budget_bytes)
    optimizers = [case.optimizer(model.parameters()) for model in (placed, whole)]
    losses: list[tuple[float, float]] = []
    errors: list[tuple[float, str]] = []
    for step in range(NUM_STEPS):
        tokens, labels = _batch(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = _pass(placed, _mine(tokens, mesh), _mine(labels, mesh))
        dist.all_reduce(loss, group=mesh.get_group("data"))
        losses.append((loss.item(), _pass(whole, tokens, labels).item()))
        errors.append(_worst_error(_gradients(placed), _gradients(whole)))
        for optimizer in optimizers:
            optimizer.step()
    return FoundOnModel(
        losses=tuple(losses),
        worst_gradient=max(errors),
        worst_parameter=_worst_error(
            dict(placed.named_parameters()), dict(whole.named_parameters())
        ),
        num_sharded=sum(
            any(p.is_shard() for p in layout) for layout in plan.parameter_layouts().values()
        ),
        unpredicted=_unpredicted(placed, plan, mesh) if dist.get_rank() == 0 else {},
        key_bias_share=_key_bias_share(whole) if name == "gpt2" else 0.0,
    )


def place(model: nn.Module, mesh: DeviceMesh, memory_budget_bytes: int) -> PlacementPlan:
    """By a plan of rank 0, which the others get."""
    sent: list[Any] = [None]
    if dist.get_rank() == 0:
        plan = find_placement(
            model,
            mesh,
            (_batch(0)[0],),
            PlacementRequest(
                constraints=Constraints(inputs={"*": BATCH_LAYOUT}, outputs={"*": BATCH_LAYOUT}),
                memory_budget_bytes=memory_budget_bytes,
                relative_gap=0.1,  # any plan of this size will do
            ),
        )
        sent = [(encode_plan(plan), plan.graph.interface)]
    dist.broadcast_object_list(sent, src=0)
    ((content, interface),) = sent
    plan = decode_plan(content, PlacementPrices())
    apply_plan(model, plan, mesh, interface=interface)
    return plan


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels (B, L) of all ranks."""
    generator = torch.Generator().manual_seed(step)
    tokens, labels = torch.randint(0, VOCABULARY, (2, BATCH, TOKENS), generator=generator)
    return tokens, labels


def _mine(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return tensor.chunk(mesh.size(0))[mesh.get_local_rank("data")]


def _pass(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """This rank's part of the mean loss over the whole batch, with gradients."""
    loss = _loss(model(tokens), labels)
    loss.backward()
    return loss.detach()


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total / (BATCH * TOKENS)


def _unpredicted(
    model: nn.Module, plan: PlacementPlan, mesh: DeviceMesh
) -> dict[tuple[str, str, int], int]:
    def step(tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(_loss(model(tokens), labels), list(model.parameters()))

    tokens, labels = _batch(0)
    traced = trace_step(step, module=model)(_mine(tokens, mesh), _mine(labels, mesh))
    found = traced_collectives(traced.graph_module.graph, mesh)
    found.subtract((c.kind, c.axis, c.num_bytes) for c in predicted_collectives(plan))
    return {collective: number for collective, number in found.items() if number}


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _worst_error(
    found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]
) -> tuple[float, str]:
    assert set(found) == set(wanted)
    with torch.no_grad():
        return max(
            (float((_whole(found[name]) - wanted[name]).norm() / wanted[name].norm()), name)
            for name in wanted
        )


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _key_bias_share(model: nn.Module) -> float:
    gradient = _gradients(model)["model.transformer.h.0.attn.c_attn.bias"]
    return float(gradient[WIDTH : 2 * WIDTH].norm() / gradient.norm())
