"""A small mixture of experts with real exchanges, for tests of chunks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional as F

from gt_config.node_keys import EpExchangeAnnotation, EpRegionAnnotation
from gt_trace.annotate import annotate

WIDTH = 8


class Exchange(nn.Module):
    """Sends each token to the rank of its expert, computes there, and brings it back.

    Each rank has one expert. Sizes of the exchanges depend on the data.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, tokens_TD: torch.Tensor, expert_T: torch.Tensor) -> torch.Tensor:
        group = dist.group.WORLD
        assert group is not None
        with annotate(EpRegionAnnotation(kind="dispatch")):
            order_T = torch.argsort(expert_T, stable=True)
            counts_E = (expert_T.unsqueeze(1) == torch.arange(group.size())).sum(dim=0)
            with annotate(EpExchangeAnnotation(kind="token_count_exchange")):
                received_E = _all_to_all(counts_E, None, None, group)
            sent, received = counts_E.tolist(), received_E.tolist()
            with annotate(EpExchangeAnnotation(kind="token_exchange")):
                here_RD = _all_to_all(tokens_TD[order_T], received, sent, group)
        with annotate(EpRegionAnnotation(kind="compute")):
            here_RD = torch.tanh(here_RD @ self.weight)
        with annotate(EpRegionAnnotation(kind="combine")):
            with annotate(EpExchangeAnnotation(kind="token_exchange")):
                back_TD = _all_to_all(here_RD, sent, received, group)
            return torch.zeros_like(tokens_TD).index_put((order_T,), back_TD)


def _all_to_all(
    tensor: torch.Tensor,
    output_sizes: list[int] | None,
    input_sizes: list[int] | None,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    result = all_to_all_single_autograd(tensor, output_sizes, input_sizes, group)
    return torch.ops._c10d_functional.wait_tensor(result)


class SmallMoE(nn.Module):
    """Routes each token to one expert, and counts in a buffer how many each got."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, num_experts, bias=False)
        self.experts = Exchange()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("tokens_per_expert_E", torch.zeros(num_experts))

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        scores_BLE = torch.softmax(self.router(x_BLD), dim=-1)
        score_BL, expert_BL = scores_BLE.max(dim=-1)
        with torch.no_grad():
            one_hot_BLE = F.one_hot(expert_BL, scores_BLE.shape[-1])
            self.tokens_per_expert_E.add_(one_hot_BLE.sum(dim=(0, 1)))
        routed_TD = self.experts(x_BLD.view(-1, WIDTH), expert_BL.view(-1))
        return routed_TD.view(x_BLD.shape) * score_BL.unsqueeze(-1) + self.shared(x_BLD)


class SmallBlock(nn.Module):
    """Attention under a mask with positions, then a mixture of experts."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.moe = SmallMoE(num_experts)

    def forward(
        self,
        x_BLD: torch.Tensor,
        mask_B1LL: torch.Tensor,
        positions_BL: torch.Tensor | None = None,
    ) -> torch.Tensor:
        h_BLD = self.norm(x_BLD)
        if positions_BL is not None:
            h_BLD = h_BLD + torch.sin(positions_BL.unsqueeze(-1).to(h_BLD.dtype))
        q_BLD, k_BLD, v_BLD = self.qkv(h_BLD).chunk(3, dim=-1)
        scores_BLL = (q_BLD @ k_BLD.transpose(1, 2)).masked_fill(~mask_B1LL[:, 0], float("-inf"))
        x_BLD = x_BLD + torch.softmax(scores_BLL, dim=-1) @ v_BLD
        return x_BLD + self.moe(x_BLD)


class SmallModel(nn.Module):
    """Two blocks between an embedding and a projection."""

    def __init__(self, num_experts: int, num_layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, WIDTH)
        self.layers = nn.ModuleDict({str(i): SmallBlock(num_experts) for i in range(num_layers)})
        self.head = nn.Linear(WIDTH, 13, bias=False)

    def forward(
        self, tokens_BL: torch.Tensor, mask_B1LL: torch.Tensor, positions_BL: torch.Tensor
    ) -> torch.Tensor:
        h_BLD = self.embedding(tokens_BL)
        for layer in self.layers.values():
            h_BLD = layer(h_BLD, mask_B1LL, positions_BL=positions_BL)
        return self.head(h_BLD)


def batch(num_samples: int = 4, length: int = 6, *, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Tokens (B, L), a mask per document (B, 1, L, L), positions (B, L), and labels (B, L)."""
    generator = torch.Generator().manual_seed(seed)
    tokens_BL = torch.randint(0, 13, (num_samples, length), generator=generator)
    starts_B = torch.randint(1, length, (num_samples, 1), generator=generator)
    index_L = torch.arange(length)
    document_BL = (index_L >= starts_B).long()
    positions_BL = torch.where(document_BL.bool(), index_L - starts_B, index_L)
    causal_LL = index_L.unsqueeze(1) >= index_L
    same_BLL = document_BL.unsqueeze(2) == document_BL.unsqueeze(1)
    labels_BL = torch.randint(0, 13, (num_samples, length), generator=generator)
    return tokens_BL, (same_BLL & causal_LL).unsqueeze(1), positions_BL, labels_BL
