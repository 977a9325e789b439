"""Values without vectors have the bits of eager execution, with a gradient and without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, linalg, nn

from gt_trace import trace_step
from gt_trace.joint import export_joint_graph, partition

VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "svdvals": linalg.svdvals,
    "cond": linalg.cond,
    "spectral norm": lambda x: linalg.matrix_norm(x, ord=2),
    "norm": lambda x: linalg.norm(x, 2),
    "nuclear norm": lambda x: torch.norm(x, "nuc"),
    "method": lambda x: x.norm("nuc"),
    "eigvalsh": lambda x: linalg.eigvalsh(x @ x.T),
    "svd without vectors": lambda x: torch.svd(x, compute_uv=False)[1],
    "svd": lambda x: linalg.svd(x)[1],
    "under vmap": lambda x: torch.func.vmap(linalg.svdvals)(torch.stack([x, 2 * x])),
}


class Scaled(nn.Module):
    def __init__(self, values: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.values = nn.Parameter(torch.randn(6, 9)), values

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            frozen = self.values(self.weight * x)
        return self.values(x).sum() * self.values(self.weight * x).sum() + frozen.sum()


@pytest.mark.parametrize("name", VALUES)
def test_values_are_those_of_eager(name: str) -> None:
    torch.manual_seed(0)
    module = Scaled(VALUES[name])

    def step(x: Tensor) -> list[Tensor]:
        loss = module(x)
        return [loss, VALUES[name](x), *torch.autograd.grad(loss, [module.weight])]

    inputs = [torch.randn(6, 9) for _ in range(3)]
    run = trace_step(step, module=module)(inputs[0]).bind(module)
    for x in inputs:
        assert all(map(torch.equal, run(x), step(x)))


def test_a_joint_graph_computes_values_as_eager() -> None:
    torch.manual_seed(0)
    module, x = Scaled(linalg.svdvals), torch.randn(6, 9)
    run = partition(export_joint_graph(module, (x,))).bind(module)
    found, wanted = ([y, *torch.autograd.grad(y, [module.weight])] for y in (run(x), module(x)))
    assert all(map(torch.equal, found, wanted))
