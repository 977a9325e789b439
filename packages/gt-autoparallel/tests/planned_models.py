"""A small model, captured and planned once for all tests that need a real plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from plan_doubles import S0
from torch import nn

from gt_autoparallel.find import planner_of_model
from gt_autoparallel.graph.layouts import MeshShape
from gt_autoparallel.plan.placement_plan import PlacementPlan
from gt_autoparallel.planner import Planner
from gt_autoparallel.problem.constraints import Constraints

TOKENS, WIDTH = 256, 512
MESH = MeshShape(names=("dp",), sizes=(4,))


class Residual(nn.Module):
    """Four layers of x + silu(x @ up) @ down."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(width) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(x)))


class NormedBlock(nn.Module):
    """As ``Block``, of a normed x."""

    def __init__(self, width: int, norm: Callable[[int], nn.Module] = nn.RMSNorm) -> None:
        super().__init__()
        self.norm = norm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Normed blocks, called ``layers.0`` and so on.

    Args:
        num_layers: of them.
        width: of each.
        norm: makes a norm of that width.
        runs: the numbers of the layers that run, in order; by default each once, as they stand.
    """

    def __init__(
        self,
        num_layers: int,
        width: int,
        norm: Callable[[int], nn.Module] = nn.RMSNorm,
        runs: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList([NormedBlock(width, norm) for _ in range(num_layers)])
        self._runs = tuple(range(num_layers) if runs is None else runs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self._runs:
            x = self.layers[number](x)
        return x


def model(width: int = WIDTH) -> Residual:
    with torch.device("meta"):
        return Residual(width)


def example(tokens: int = TOKENS) -> tuple[torch.Tensor]:
    return (torch.empty(tokens, WIDTH, device="meta"),)


@cache
def planner() -> Planner:
    return planner_of_model(model(), MESH, example())


@cache
def plan() -> PlacementPlan:
    """Inputs come sharded over ranks, as a data loader gives them."""
    return planner().find(constraints=Constraints(inputs={"x": [S0]}))
