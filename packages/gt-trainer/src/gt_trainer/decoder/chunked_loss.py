"""The chunked loss whose every gradient comes back through autograd.

A decoder's logits are its largest activation, so torchtitan applies the output projection and the
loss to one piece of the sequence at a time (``torchtitan/components/loss.py``,
``ChunkedLossWrapper``). It calls ``backward`` on each piece, which writes ``param.grad`` of the
projection on the side: a step captured with ``torch.autograd.grad`` never sees that gradient. Here
each piece is differentiated with ``torch.autograd.grad``, and one autograd function hands the sums
on, to the hidden states and to the projection's weights alike.

The sharded weights of the projection are gathered once for all pieces, hence also reduced once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import ChunkedLossWrapper

from gt_trace.fsdp import gathered

_SEQUENCE_DIM = 1


class ChunkedLossError(ValueError):
    """The loss cannot be computed in the configured number of chunks."""


class GraphChunkedLoss(ChunkedLossWrapper):
    """Output projection and loss, one chunk of the sequence at a time.

    The value is that of the inner loss on the whole sequence, up to the order of summation, since
    torchtitan's losses are sums over tokens. Gradients are summed in a fixed order, chunk 0 first;
    those of the weights are summed in float32 (float64 for float64 weights) whatever the weights'
    dtype, and rounded to it once. Eager execution and a captured graph run the same operators.

    The result may be scaled or added to before it is differentiated: the gradients follow.
    Weights that also serve elsewhere (a tied embedding) get the sum of both gradients.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        """As torchtitan's: ``num_chunks`` and the inner ``loss_fn``."""

    def __call__(
        self,
        pred: torch.Tensor,
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor | None = None,
        **loss_inputs: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute the loss of one batch.

        Args:
            pred: (B, L, D) hidden states, the model's output without its output projection. A
                DTensor under tensor parallelism, replicated between ranks.
            labels: (B, L) token ids; torchtitan's IGNORE_INDEX marks those that do not count.
            global_valid_tokens: Scalar that every chunk's loss is divided by: the number of tokens
                that count, on all ranks. None, as in validation, leaves the sum.
            **loss_inputs: More for the inner loss; (B, L, ...) tensors are chunked too.

        Returns:
            The scalar loss, float32, and the inner loss's metrics combined over the chunks.

        Raises:
            ChunkedLossError: L is not divisible by the number of chunks, or the projection has not
                been set.
        """
        lm_head = self.lm_head
        if lm_head is None:
            raise ChunkedLossError(
                "the chunked loss has no output projection: call set_lm_head(model.lm_head) first"
            )
        differentiate = torch.is_grad_enabled() and pred.requires_grad
        hidden_chunks = [
            chunk.requires_grad_(differentiate) for chunk in self._chunks("pred", pred.detach())
        ]
        label_chunks = self._chunks("labels", labels)
        input_chunks = {
            key: self._chunks(key, value)
            for key, value in loss_inputs.items()
            if isinstance(value, torch.Tensor)
        }
        with gathered(lm_head):
            weights = _trainable_weights(lm_head) if differentiate else []
            total_loss = torch.zeros((), dtype=torch.float32, device=labels.device)
            metrics: dict[str, torch.Tensor] = {}
            hidden_gradients: list[torch.Tensor] = []
            weight_sums: list[torch.Tensor] = []
            for index, hidden in enumerate(hidden_chunks):
                chunk_inputs = loss_inputs | {key: c[index] for key, c in input_chunks.items()}
                loss, chunk_metrics = self.loss_fn(
                    lm_head(hidden), label_chunks[index], global_valid_tokens, **chunk_inputs
                )
                metrics = self._combine_chunk_metrics(metrics, chunk_metrics)
                total_loss = total_loss + loss.detach()
                if differentiate:
                    hidden_gradient, *weight_gradients = torch.autograd.grad(
                        loss, [hidden, *weights]
                    )
                    hidden_gradients.append(hidden_gradient)
                    weight_sums = _add(weight_sums, weight_gradients)
        if not differentiate:
            return total_loss, metrics
        gradients = [
            _concatenate(hidden_gradients),
            *(total.to(weight.dtype) for total, weight in zip(weight_sums, weights, strict=True)),
        ]
        loss = _LossWithGradients.apply(total_loss, len(gradients), *gradients, pred, *weights)
        return loss, metrics

    def _chunks(self, name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Cut (B, L, ...) into pieces of equal length; of a DTensor, each rank's own part."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        length = local.shape[_SEQUENCE_DIM]
        if length % self.num_chunks != 0:
            raise ChunkedLossError(
                f"{name} has sequence length {length}, which is not divisible by the loss's "
                f"{self.num_chunks} chunks: choose another --training.seq_len or "
                "--loss.num_chunks"
            )
        pieces = [
            piece.contiguous()
            for piece in torch.split(local, length // self.num_chunks, dim=_SEQUENCE_DIM)
        ]
        if not isinstance(tensor, DTensor):
            return pieces
        return [
            DTensor.from_local(piece, tensor.device_mesh, tensor.placements, run_check=False)
            for piece in pieces
        ]


class _LossWithGradients(torch.autograd.Function):
    """A loss that brings its gradients along.

    ``apply(loss, n, *gradients, *inputs)`` with n gradients and the n inputs that they belong to
    returns ``loss``; differentiating it gives each input its gradient times the upstream one.
    """

    @staticmethod
    def forward(
        ctx: Any, loss: torch.Tensor, num_gradients: int, *gradients_and_inputs: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(*gradients_and_inputs[:num_gradients])
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients: tuple[torch.Tensor, ...] = ctx.saved_tensors
        scaled = (_scale(gradient, upstream) for gradient in gradients)
        return (None, None, *(None for _ in gradients), *scaled)


def _trainable_weights(lm_head: nn.Module) -> list[torch.Tensor]:
    """The projection's weights as its forward reads them: gathered where they are sharded."""
    return [
        getattr(module, name)
        for module in lm_head.modules()
        for name, stored in module.named_parameters(recurse=False)
        if stored.requires_grad
    ]


def _add(sums: list[torch.Tensor], gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    wide = [
        gradient if gradient.dtype == torch.float64 else gradient.float() for gradient in gradients
    ]
    if not sums:
        return wide
    return [total + gradient for total, gradient in zip(sums, wide, strict=True)]


def _concatenate(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Join chunk gradients along the sequence; DTensors keep their placement, also Partial."""
    first = gradients[0]
    if not isinstance(first, DTensor):
        return torch.cat(gradients, dim=_SEQUENCE_DIM)
    parts = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
    return DTensor.from_local(
        torch.cat(parts, dim=_SEQUENCE_DIM), first.device_mesh, first.placements, run_check=False
    )


def _scale(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Multiply by a plain scalar; a Partial DTensor stays Partial, since scaling is linear."""
    if not isinstance(gradient, DTensor):
        return gradient * factor.to(gradient.dtype)
    local = gradient.to_local()
    return DTensor.from_local(
        local * factor.to(local.dtype),
        gradient.device_mesh,
        gradient.placements,
        run_check=False,
        shape=gradient.shape,
        stride=gradient.stride(),
    )
