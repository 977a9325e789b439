"""A small mixture-of-experts transformer over two ranks, captured as a step, for graph chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.nn import functional as F

from gt_config.node_keys import EpExchangeAnnotation, EpRegionAnnotation
from gt_trace import TracedStep, annotate, phase, trace_step

WIDTH, HIDDEN, VOCABULARY, NUM_EXPERTS, TOP_K, NUM_LAYERS = 16, 24, 40, 4, 2, 2


def _let_experts_be_float32() -> None:
    """Before 2.15, PyTorch refuses fakes of the experts' product in a dtype that it computes in."""

    def fake(x: torch.Tensor, w: torch.Tensor, *, offs: torch.Tensor, **_: Any) -> torch.Tensor:
        is_batched = w.dim() == 3
        sizes = (x.shape[0], w.shape[2]) if is_batched else (offs.shape[0], x.shape[0], w.shape[1])
        return x.new_empty(sizes)

    with FakeTensorMode():
        x, w = torch.empty(8, 8), torch.empty(1, 8, 8)
        try:
            torch._grouped_mm(x, w, offs=torch.empty(1, dtype=torch.int32))
        except RuntimeError:
            vars(torch._meta_registrations)["_meta_grouped_mm_common"] = fake


_let_experts_be_float32()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCase:
    """What is run."""

    batch: int = 4
    sequence: int = 6
    closed_experts: tuple[int, ...] = ()
    """Experts to which no token goes."""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x_BLD.shape
        q, k, v = self.qkv(x_BLD).view(batch, length, 3, 2, WIDTH // 2).unbind(2)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        return self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))


class Experts(nn.Module):
    """Dispatch, compute and combine, with exchanges whose sizes depend on data."""

    def __init__(self) -> None:
        super().__init__()
        num_local = NUM_EXPERTS // dist.get_world_size()
        self.w1 = nn.Parameter(torch.randn(num_local, WIDTH, HIDDEN) * 0.2)
        self.w2 = nn.Parameter(torch.randn(num_local, HIDDEN, WIDTH) * 0.2)

    def forward(
        self, x_BLD: torch.Tensor, weight_BLK: torch.Tensor, expert_BLK: torch.Tensor
    ) -> torch.Tensor:
        group = dist.group.WORLD
        assert group is not None
        ranks = group.size()
        batch, length, width = x_BLD.shape
        x_TD = x_BLD.view(-1, width)
        with annotate(EpRegionAnnotation(kind="dispatch")):
            expert_N = expert_BLK.view(-1)
            order_N = torch.argsort(expert_N, stable=True)
            token_N = order_N // TOP_K
            weight_N = weight_BLK.view(-1)[order_N]
            counts_E = torch.zeros(NUM_EXPERTS, dtype=torch.int64).scatter_add(
                0, expert_N, torch.ones_like(expert_N)
            )
            with annotate(EpExchangeAnnotation(kind="token_count_exchange")):
                theirs_E = all_to_all_single(counts_E, None, None, group)
                theirs_E = torch.ops._c10d_functional.wait_tensor(theirs_E)
            sent = counts_E.view(ranks, -1).sum(1).tolist()
            received = theirs_E.view(ranks, -1).sum(1).tolist()
            with annotate(EpExchangeAnnotation(kind="token_exchange")):
                here_RD = exchange(x_TD[token_N], received, sent, group)
            local_R = torch.repeat_interleave(
                torch.arange(NUM_EXPERTS // ranks).repeat(ranks),
                theirs_E,
                output_size=here_RD.shape[0],
            )
            by_expert_R = torch.argsort(local_R, stable=True)
            here_RD = here_RD[by_expert_R]
        with annotate(EpRegionAnnotation(kind="compute")):
            ends = theirs_E.view(ranks, -1).sum(0).cumsum(0).to(torch.int32)
            hidden = F.silu(torch._grouped_mm(here_RD, self.w1, offs=ends))
            here_RD = torch._grouped_mm(hidden, self.w2, offs=ends)
        with annotate(EpRegionAnnotation(kind="combine")):
            back_RD = torch.zeros_like(here_RD).index_put((by_expert_R,), here_RD)
            with annotate(EpExchangeAnnotation(kind="token_exchange")):
                back_ND = exchange(back_RD, sent, received, group)
            scored_ND = back_ND * weight_N.unsqueeze(-1)
            index_ND = token_N.unsqueeze(-1).expand(-1, width)
            out_TD = torch.zeros_like(x_TD).scatter_add(0, index_ND, scored_ND)
        return out_TD.view(batch, length, width)


def exchange(
    x: torch.Tensor, output_sizes: list[int], input_sizes: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    return torch.ops._c10d_functional.wait_tensor(
        all_to_all_single_autograd(x, output_sizes, input_sizes, group)
    )


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = Experts()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("bias", torch.zeros(NUM_EXPERTS))
        self.register_buffer("counts", torch.zeros(NUM_EXPERTS))

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        scores_BLE = self.gate(x_BLD).softmax(-1)
        expert_BLK = (scores_BLE + self.bias).topk(TOP_K, dim=-1).indices
        weight_BLK = scores_BLE.gather(-1, expert_BLK)
        routed = torch.zeros_like(scores_BLE, dtype=torch.bool).scatter_(-1, expert_BLK, True)
        with torch.no_grad():
            self.counts.add_(routed.sum(dim=(0, 1)))
        return self.experts(x_BLD, weight_BLK, expert_BLK) + self.shared(x_BLD)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.moe = Attention(), MoE()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.moe(self.norm2(x))


class SmallModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens_BL)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_model(case: StepCase, *, seed: int = 0) -> SmallModel:
    """The same on every rank but for the experts; experts that are closed get no token."""
    torch.manual_seed(seed)
    model = SmallModel()
    torch.manual_seed(seed + 1 + dist.get_rank())
    for layer in model.layers:
        nn.init.normal_(layer.moe.experts.w1, std=0.2)
        nn.init.normal_(layer.moe.experts.w2, std=0.2)
        for expert in case.closed_experts:
            layer.moe.bias[expert] = float("-inf")
    return model


def make_inputs(case: StepCase, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of this rank."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    shape = (case.batch, case.sequence)
    return tuple(torch.randint(VOCABULARY, shape, generator=generator) for _ in range(2))  # type: ignore[return-value]  # two of them


def capture(model: SmallModel, inputs: tuple[torch.Tensor, torch.Tensor]) -> TracedStep:
    """Forward, loss and gradients of all parameters, as one graph."""

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = model(tokens)
        with phase("loss"):
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    return trace_step(step, module=model)(*inputs)
