"""Small stages that tests capture. Workers import this module by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gt_pipeline.graph import StageCapture, StageGraphs
from gt_pipeline.graph.stage_cut import recompose
from gt_pipeline.runner import ActivationSignature

WIDTH = 8
ROWS = 4
ACTIVATION = ActivationSignature(shape=(ROWS, WIDTH), dtype=torch.float32, requires_grad=True)


class Block(nn.Module):
    """A residual block with two matrix products and a norm."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.norm(self.up(x))))


class CountingBlock(Block):
    """Updates a buffer in its forward, reads it there, and so needs it in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.first = nn.Parameter(torch.randn(WIDTH))
        self.second = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.detach().sum(0))
        # Both parameters are only ever added: their gradients are one value.
        return super().forward(x) * self.seen.clone() + self.first + self.second


class ReadsWritten(nn.Module):
    """Its backward reads the buffer itself, which the next microbatch's forward has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.add_(1.0)
        return _Scaled.apply(x, self.scale)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, scale: Tensor) -> Tensor:
        ctx.scale = scale  # not saved for backward: autograd does not watch it
        return x * scale

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.scale, None


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def random_inputs(capture: StageCapture) -> list[Tensor]:
    """For each placeholder of a joint graph."""
    return [
        torch.randn(fake.shape, dtype=fake.dtype)
        if fake.dtype.is_floating_point
        else torch.randint(0, 5, fake.shape)
        for fake in capture.traced.example_inputs
    ]


def run_joint(capture: StageCapture, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Results, and the inputs as they are afterwards."""
    copies = [each.clone() for each in inputs]
    results = list(capture.traced.graph_module(*copies))
    return results, copies


def run_recomposed(
    graphs: StageGraphs, inputs: Sequence[Tensor], *, split_backward: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """The same through the graphs of actions."""
    copies = [each.clone() for each in inputs]
    results = list(recompose(graphs, split_backward=split_backward)(*copies))
    return results, copies


def same_bits(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> bool:
    """Whether every tensor is the same to the bit."""
    return len(first) == len(second) and all(
        (a is None and b is None)
        or (a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b))
        for a, b in zip(first, second, strict=True)
    )


class Selecting(nn.Module):
    """Computes on the rows that are positive: how many those are depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = (x.sum(dim=1) > 0).nonzero().squeeze(1)
        y = self.linear(x[rows])
        return x.index_add(0, rows, y * y.mean(dim=0))


class RandomStage(nn.Module):
    """A stage that strings pieces together, by number.

    Args:
        pieces: (piece, operand) pairs: which piece, and which earlier value it reads besides.
        num_inputs: of activations.
        num_outputs: the last values.
    """

    PIECES = (
        "block",
        "tied",
        "norm",
        "scale",
        "shift",
        "count",
        "add",
        "multiply",
        "halves",
        "transposed",
        "frozen",
        "select",
        "expand",
        "noise",
    )

    def __init__(
        self, pieces: Sequence[tuple[str, int]], *, num_inputs: int, num_outputs: int
    ) -> None:
        super().__init__()
        self.pieces = pieces
        self.num_inputs, self.num_outputs = num_inputs, num_outputs
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(
            {"block": Block, "norm": lambda: nn.LayerNorm(WIDTH), "select": Selecting}.get(
                piece, nn.Identity
            )()
            for piece, _ in pieces
        )
        self.vectors = nn.ParameterList(torch.randn(WIDTH) for _ in pieces)
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, *activations: Tensor) -> tuple[Tensor, ...]:
        # Every activation gets a gradient: a stage where one gets none is refused.
        values = [*activations, torch.stack(activations).sum(0)]
        for index, (piece, operand) in enumerate(self.pieces):
            values.append(self._piece(piece, index, values[-1], values[operand % len(values)]))
        return tuple(values[-self.num_outputs :])

    def _piece(self, piece: str, index: int, x: Tensor, other: Tensor) -> Tensor:
        vector = self.vectors[index]
        match piece:
            case "tied":
                return torch.tanh(self.tied(x))
            case "scale":
                return x * vector
            case "shift":
                return x + vector
            case "count":
                self.seen.add_(x.detach().mean(0))
                return x * self.seen.clone()
            case "add":
                return x + other
            case "multiply":
                return x * torch.sigmoid(other)
            case "halves":
                left, right = x.chunk(2, dim=1)
                return torch.cat([right.relu(), left], dim=1)
            case "transposed":
                return (x.t().contiguous() * vector.unsqueeze(1)).t()
            case "frozen":
                return x * self.frozen
            case "expand":
                return x + vector.sum().expand(WIDTH)
            case "noise":
                return x + torch.rand_like(x) * vector
        return self.parts[index](x)
