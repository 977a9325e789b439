"""The loss of a run whose model a solver places: of this rank's tokens, some at a time.

torchtitan's chunked loss takes the output projection out of the model, and the planner would not
see the largest matrix of it. So a placed model returns logits. They are its largest tensor. Each
rank of tensor parallelism has those of its part of the tokens (``planned_mesh.token_layout``),
computes their loss, and adds those of the others. The loss of a part is differentiated chunk by
chunk, so that what it holds in float32 is a chunk's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper
from torchtitan.config import CompileConfig
from torchtitan.distributed import ParallelDims

from gt_trainer.decoder.chunked_loss import GraphChunkedLoss

_SEQUENCE_DIM = 1
_NUM_CHUNKS = 8
"""Of a rank's tokens; torchtitan's default for hidden states."""


def loss_of(config: Any) -> BaseLoss.Config:
    """The configured loss; if a solver places the model, the same of logits in parts.

    Its value is the same up to the order of summation.

    Args:
        config: a ``GraphTrainer.Config``.
    """
    loss: BaseLoss.Config = config.loss
    if not config.compile.autoparallel:
        return loss
    if isinstance(loss, ChunkedLossWrapper.Config):
        loss = loss.loss_fn
    loss = LossOfLogits.Config(loss_fn=loss)
    if config.parallelism.tensor_parallel_degree == 1:
        return loss
    return LossOfParts.Config(loss_fn=loss)


def num_chunks(num_tokens: int) -> int:
    """In how many chunks the loss of so many tokens of each sample is computed."""
    return math.gcd(num_tokens, _NUM_CHUNKS)


class LossOfLogits(BaseLoss):
    """A loss that sums over tokens, one chunk of a sequence's logits at a time.

    Its gradient is made with it, chunk by chunk, in the dtype of the logits.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        """The loss of a chunk."""

        loss_fn: BaseLoss.Config

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None) -> None:
        """See ``Config``."""
        self._chunked = GraphChunkedLoss(
            GraphChunkedLoss.Config(loss_fn=config.loss_fn), compile_config=compile_config
        )
        self._chunked.set_lm_head(nn.Identity())  # the projection is the model's

    def __call__(
        self,
        pred: torch.Tensor,
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor | None = None,
        **loss_inputs: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """As ``GraphChunkedLoss``, of (B, l, V) logits in place of hidden states."""
        self._chunked.num_chunks = num_chunks(pred.shape[_SEQUENCE_DIM])
        return self._chunked(pred, labels, global_valid_tokens, **loss_inputs)


class LossOfParts(BaseLoss):
    """A loss that sums over tokens, of logits of which each tensor-parallel rank has some tokens.

    Where it has all of them, as where a sequence does not divide, it is the loss itself.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        """The loss of one part."""

        loss_fn: BaseLoss.Config

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None) -> None:
        """See ``Config``; it knows its ranks after ``set_ranks``."""
        self.loss_fn: BaseLoss = config.loss_fn.build(compile_config=compile_config)
        self._group: dist.ProcessGroup | None = None

    def set_ranks(self, parallel_dims: ParallelDims) -> None:
        """Say which ranks have the parts of a sequence, in order."""
        self._group = parallel_dims.get_mesh("tp").get_group()

    def __call__(
        self,
        pred: torch.Tensor,
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor | None = None,
        **loss_inputs: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute the loss of a batch.

        Args:
            pred: (B, l, V) logits of this rank's tokens.
            labels: (B, L) token ids of all.
            global_valid_tokens: as for the inner loss.
            **loss_inputs: likewise; of (B, L, ...) tensors it gets this rank's part.

        Returns:
            The scalar loss of all tokens, on every rank, and the inner loss's metrics, likewise.
        """
        if pred.shape[_SEQUENCE_DIM] == labels.shape[_SEQUENCE_DIM]:
            return self.loss_fn(pred, labels, global_valid_tokens, **loss_inputs)
        group = self._group
        assert group is not None, "set_ranks comes before the first batch"

        def part(of_all: torch.Tensor) -> torch.Tensor:
            return of_all.chunk(group.size(), dim=_SEQUENCE_DIM)[group.rank()]

        inputs = {
            name: part(each) if isinstance(each, torch.Tensor) else each
            for name, each in loss_inputs.items()
        }
        loss, metrics = self.loss_fn(pred, part(labels), global_valid_tokens, **inputs)
        total: torch.Tensor = _SumOverRanks.apply(loss, group.group_name)
        return total, {name: _summed(each, group.group_name) for name, each in metrics.items()}


class _SumOverRanks(torch.autograd.Function):
    """The sum of a scalar over ranks; each rank differentiates its own part of it."""

    @staticmethod
    def forward(ctx: Any, scalar: torch.Tensor, group_name: str) -> torch.Tensor:
        return _summed(scalar, group_name)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        return upstream, None


def _summed(scalar: torch.Tensor, group_name: str) -> torch.Tensor:
    collectives = torch.ops._c10d_functional
    total: torch.Tensor = collectives.wait_tensor(
        collectives.all_reduce(scalar.detach(), "sum", group_name)
    )
    return total
