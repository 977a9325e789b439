"""A memory policy of one's own: which activations are kept, and which are computed again.

::

    pip install ./packages/gt-config ./packages/gt-trace ./packages/gt-passes
    python examples/memory_policy.py

A policy is a pass that answers one question about each operator, and is registered like a pass.
By its name, ``gt-train --module my.module --config my_config --compile.passes
recompute-some-feed-forwards`` runs it too, if my/module.py imports this file.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.nn import functional as F

from gt_config import CompileConfig
from gt_passes import MemoryPolicyPass, estimate_peak_bytes, optimize, register_pass
from gt_trace import module_fqn, trace_step

WIDTH = 64


# [start: policy]
@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeSomeFeedForwards(MemoryPolicyPass):
    """Compute the feed-forwards of every second layer again; keep everything else."""

    name: ClassVar[str] = "recompute-some-feed-forwards"

    every: int = 2

    def keeps(self, node: Node) -> bool:
        """Whether the result of an operator stays until the backward."""
        _, layer, *inner = module_fqn(node).split(".")  # as layers.3.feed_forward.0
        return int(layer) % self.every != 0 or "feed_forward" not in inner


# [end: policy]


class Layer(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(up, nn.GELU(), down)

    def forward(self, hidden: Tensor) -> Tensor:
        """Add both to the residual stream, of shape (batch, length, width)."""
        query, key, value = self.qkv(F.layer_norm(hidden, (WIDTH,))).chunk(3, dim=-1)
        hidden = hidden + F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return hidden + self.feed_forward(F.layer_norm(hidden, (WIDTH,)))


def main() -> None:
    """Capture a step, run the recipe with each policy, and compare memory and gradients."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"layers": nn.ModuleList(Layer() for _ in range(4))})
    hidden = torch.randn(8, 64, WIDTH)

    def step(hidden: Tensor) -> tuple[Tensor, ...]:
        for layer in model["layers"]:
            hidden = layer(hidden)
        return torch.autograd.grad(hidden.square().mean(), list(model.parameters()))

    expected = step(hidden)
    for title, options in (
        ("save all", CompileConfig()),
        ("of our own", CompileConfig(passes=("recompute-some-feed-forwards",))),
        ("recompute all", CompileConfig(memory_policy="full_recompute")),
    ):
        traced = trace_step(step, module=model)(hidden)
        optimize(traced, options)
        peak = estimate_peak_bytes(traced.graph_module)
        same = all(map(torch.equal, traced.bind(model)(hidden), expected))
        print(f"{title}: estimated peak {peak / 2**20:.1f} MiB, gradients to the bit: {same}")


if __name__ == "__main__":
    main()
