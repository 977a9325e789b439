"""The training step of a run whose model a solver places: its loss."""

from __future__ import annotations

from typing import Any

from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper


def loss_of(config: Any) -> BaseLoss.Config:
    """The configured loss; of a chunked one the loss inside, if a solver places the model.

    A chunked loss takes the output projection out of the model, and the planner would not see the
    largest matrix of it. The value is the same up to the order of summation.

    Args:
        config: a ``GraphTrainer.Config``.
    """
    loss: BaseLoss.Config = config.loss
    if config.compile.autoparallel and isinstance(loss, ChunkedLossWrapper.Config):
        inner: BaseLoss.Config = loss.loss_fn
        return inner
    return loss
