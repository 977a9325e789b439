"""Small models that the tests of joint graphs export."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Gelu(nn.Module):
    """A linear layer and a GELU: few enough operators to write down."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.linear(x))


class ManyNames(nn.Module):
    """Parameters whose order of registration, of names and of use all differ."""

    def __init__(self) -> None:
        super().__init__()
        self.zeta = nn.Parameter(torch.rand(3))
        self.register_buffer("tangents", torch.rand(3))
        self.alpha = nn.Parameter(torch.rand(3))
        self.x = nn.Parameter(torch.rand(3))
        self.frozen = nn.Parameter(torch.rand(3), requires_grad=False)
        self.unused = nn.Parameter(torch.rand(3))

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        return (self.x * x + self.zeta * self.frozen) * self.alpha.exp() * scale + self.tangents


class Tree(nn.Module):
    """Returns a tree: two tensors with a gradient, one without, and what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, *, name: str = "tree") -> dict[str, Any]:
        hidden = self.a(x)
        return {
            "logits": self.b(hidden),
            "more": (hidden.sin(), hidden.argmax(-1)),
            "name": name,
            "nothing": None,
        }


class Dropping(nn.Module):
    """Random in the forward, with something to gain by computing it again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 64)
        self.down = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.dropout(torch.relu(self.up(x)).cos(), 0.5))


class Chosen(nn.Module):
    """How many rows it computes with depends on the data, as expert parallelism's splits do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (x.sum(-1) > 0).nonzero().squeeze(-1)
        chosen = self.linear(x.index_select(0, rows)).tanh()
        return torch.zeros_like(x).index_add(0, rows, chosen * chosen.shape[0])
