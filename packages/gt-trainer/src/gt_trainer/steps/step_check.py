"""Gradients or a loss that are not finite end a run, before the step's update is saved.

torchtitan looks at the loss of reported steps alone, after their update: gradients that are not
finite under a finite loss would be applied and saved, as would what steps between reports did.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import distributed as dist

from gt_trainer.device_transfer import HostCopy, copy_to_host, local_part
from gt_trainer.launcher import RunStoppedError


class NonFiniteGradientsError(RunStoppedError):
    """A step's gradients have NaN or infinite elements, on some rank."""


class NonFiniteLossError(RunStoppedError):
    """The loss of a step is NaN or infinite, though its gradients are finite."""


class StepCheck:
    """Ends a run if gradients of any rank, or the loss, are not finite, before a step is saved.

    On CPU gradients are judged before their update. Elsewhere that would leave the device without
    work in every step: a step is judged before the update of the next one, which the device has by
    then been given to compute, and in ``settle``. Until then its update is in memory, nowhere else.

    Args:
        device: where the ranks communicate.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._gradients: tuple[int, HostCopy] | None = None
        self._loss: tuple[int, HostCopy] | None = None

    def check_gradients(self, parameters: Iterable[torch.Tensor], *, step: int) -> None:
        """Judge the step before, or on CPU this one. All ranks call this together.

        Args:
            parameters: those of this rank, gradients accumulated and clipped. Clipping makes all
                elements NaN if the norm was NaN, and leaves NaN where an element was infinite.
            step: the step whose update they are for.

        Raises:
            NonFiniteGradientsError: On every rank, naming the step that is judged.
            NonFiniteLossError: The loss of the step before is not finite.
        """
        self.settle()
        gradients = [local_part(each.grad) for each in parameters if each.grad is not None]
        # The largest magnitude, NaN if one is. Of a small parameter, a shard may be empty.
        gradients = [each for each in gradients if each.numel()]
        largest = torch.nn.utils.get_total_norm(gradients, math.inf)
        is_finite = torch.isfinite(largest).to(self._device, torch.int32)
        dist.all_reduce(is_finite, dist.ReduceOp.MIN)
        verdict = copy_to_host({"is_finite": is_finite})
        self._gradients = (step, verdict)
        if verdict.copied is None:
            self._judge_gradients(
                fate="Their update was not made, and nothing of this step was saved."
            )

    def check_loss(self, numbers: HostCopy, *, step: int) -> None:
        """Judge the loss of a step: on CPU now, elsewhere with its gradients.

        Args:
            numbers: has "loss", of all data-parallel ranks.
            step: that was made.

        Raises:
            NonFiniteLossError: On the ranks that have the loss: with a pipeline, of its last stage.
        """
        self._loss = (step, numbers)
        if numbers.copied is None:
            self._judge_loss()

    def settle(self) -> None:
        """Judge the last step that was checked: call it before anything of it is saved.

        Waits until that step has been computed.

        Raises:
            NonFiniteGradientsError: On every rank, if they all call this.
            NonFiniteLossError: As ``check_loss``.
        """
        self._judge_gradients(fate="Nothing of this step was saved.")
        self._judge_loss()

    def _judge_gradients(self, *, fate: str) -> None:
        if self._gradients is None:
            return
        step, verdict = self._gradients
        self._gradients = None
        if not verdict.wait()["is_finite"]:
            self._loss = None  # of these gradients nothing else is to be said
            raise NonFiniteGradientsError(
                f"step {step}: gradients are not finite (NaN or infinite). {fate}\n"
                "  Often the learning rate is too high "
                "(--optimizer.param_groups.0.optimizer_kwargs.lr),\n"
                "  or its warm-up too short (--lr_scheduler.warmup_steps)"
            )

    def _judge_loss(self) -> None:
        if self._loss is None:
            return
        step, numbers = self._loss
        self._loss = None
        loss = numbers.wait()["loss"]
        if not math.isfinite(loss):
            raise NonFiniteLossError(
                f"step {step}: the loss is {loss}, though its gradients are finite. "
                "Nothing of this step was saved."
            )
