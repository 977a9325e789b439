"""What the tests of compilation share: a small model, its captured step, a compiler for tests."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from pass_graphs import capture
from torch import nn
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
from torch.fx import GraphModule
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask

from gt_passes import GraphPass, InductorCompiler, PassContext, PassManager, PassReport
from gt_passes.analysis.outlined_region import Runner
from gt_trace.capture.trace import trace_step
from gt_trace.capture.traced_step import TracedStep

COMPILER = InductorCompiler(options={"compile_threads": 1})


class CountingCompiler:
    """Compiles nothing, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.bodies: list[GraphModule] = []
        self.options: list[Mapping[str, object]] = []

    def compile(self, body: GraphModule, options: Mapping[str, object]) -> Runner:
        self.bodies.append(body)
        self.options.append(options)
        return body


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(8, 16, bias=False)
        self.w2 = nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.feed_forward = FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.feed_forward(self.norm(x))


class Model(nn.Module):
    """Two equal blocks, and a buffer that counts the steps."""

    num_steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: Block() for name in "01"})
        self.register_buffer("num_steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_steps.add_(1)
        for layer in self.layers.values():
            x = layer(x)
        return x


def flex_attention_graph(
    num_layers: int = 2, *, backward: bool = True
) -> tuple[GraphModule, tuple[torch.Tensor, ...]]:
    """FlexAttention over a causal mask, as a captured step calls it, and inputs for the graph.

    The operators are called directly: CPU has no backward to differentiate through.
    """
    q = torch.randn(1, 2, 128, 16)
    mask = create_block_mask(_is_causal, None, None, 128, 128, device="cpu").as_tuple()[:-1]
    options = {
        "BACKEND": "AUTO",
        "PRESCALE_QK": False,
        "ROWS_GUARANTEED_SAFE": False,
        "BLOCKS_ARE_CONTIGUOUS": False,
        "WRITE_DQ": True,
        "OUTPUT_LOGSUMEXP": backward,
        "OUTPUT_MAX": False,
    }
    block_sizes, block_tensors = mask[:2], [block for block in mask[2:] if block is not None]

    def step(
        x: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        gradient: torch.Tensor,
        *blocks: torch.Tensor,
    ) -> object:
        remaining = iter(blocks)
        block_mask = (
            *block_sizes,
            *(None if block is None else next(remaining) for block in mask[2:]),
            _is_causal,
        )
        results = []
        for _ in range(num_layers):
            out, logsumexp, _ = flex_attention(x, k, v, _score, block_mask, 0.25, options)
            if not backward:
                return out
            gradients = flex_attention_backward(
                x, k, v, out, logsumexp, gradient, torch.zeros_like(logsumexp),
                _score, _score_and_gradient, block_mask, 0.25, options,
            )  # fmt: skip
            results += gradients[:3]
            x = out.relu()
        return results

    inputs = (q, q.clone(), q.clone(), q.clone(), *block_tensors)
    return capture(step, *inputs), inputs


def _score(score, batch, head, query, key):
    return score


def _score_and_gradient(score, batch, head, query, key, gradient):
    return gradient, None, None, None, None


def _is_causal(batch, head, query, key):
    return query >= key


def captured_step(model: nn.Module, *inputs: torch.Tensor, device: str = "meta") -> TracedStep:
    """Forward, loss and gradients of a model as one graph.

    Args:
        model: on its device, or on meta, to be captured for ``device``.
        inputs: likewise.
        device: needs not exist.
    """

    def step(*args: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        loss = model(*args).square().mean()
        return loss, torch.autograd.grad(loss, tuple(model.parameters()))

    return trace_step(step, module=model, meta_device=device)(*inputs)


def run_on(graph_pass: GraphPass, step: TracedStep) -> tuple[PassReport, GraphModule]:
    """Run one pass on a captured step, verified. Returns the graph as it was, too."""
    before = copy.deepcopy(step.graph_module)
    names = tuple(entry.name for entry in step.inputs[: step.num_static_inputs])
    context = PassContext(fake_mode=step.fake_mode, static_input_names=names)
    (record,) = PassManager([graph_pass], context=context).run(step.graph_module).records
    return record.report, before


def relative_difference(first: torch.Tensor, second: torch.Tensor) -> float:
    """The largest difference, relative to the largest element."""
    return ((first - second).abs().max() / first.abs().max().clamp_min(1e-30)).item()
