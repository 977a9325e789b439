"""Gradients that are not finite end a run, before an update by them is saved.

torchtitan looks at the loss of a step alone, after its update: gradients that are not finite under
a finite loss would be applied and saved.
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


class GradientCheck:
    """Stops every rank if a gradient on any of them is not finite, before the update is saved.

    On CPU a step is judged before its update. Elsewhere that would leave the device without work
    in every step: a step is judged before the update of the next one, which the device has by then
    been given to compute, and in ``settle``. Until then its update is in memory, nowhere else.

    Args:
        device: where the ranks communicate.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._unjudged: tuple[int, HostCopy] | None = None

    def check(self, parameters: Iterable[torch.Tensor], *, step: int) -> None:
        """Judge the step before, or on CPU this one. All ranks call this together.

        Args:
            parameters: those of this rank, gradients accumulated and clipped. Clipping makes all
                elements NaN if the norm was NaN, and leaves NaN where an element was infinite.
            step: the step whose update they are for.

        Raises:
            NonFiniteGradientsError: On every rank, naming the step that is judged.
        """
        self.settle()
        gradients = [local_part(each.grad) for each in parameters if each.grad is not None]
        # The largest magnitude, NaN if one is. Of a small parameter, a shard may be empty.
        gradients = [each for each in gradients if each.numel()]
        largest = torch.nn.utils.get_total_norm(gradients, math.inf)
        is_finite = torch.isfinite(largest).to(self._device, torch.int32)
        dist.all_reduce(is_finite, dist.ReduceOp.MIN)
        verdict = copy_to_host({"is_finite": is_finite})
        self._unjudged = (step, verdict)
        if verdict.copied is None:
            self._judge(fate="Their update was not made, and nothing of this step was saved.")

    def settle(self) -> None:
        """Judge the last step that was checked: call it before anything of it is saved.

        Waits until the gradients of that step have been computed.

        Raises:
            NonFiniteGradientsError: On every rank, if they all call this.
        """
        self._judge(fate="Nothing of this step was saved.")

    def _judge(self, *, fate: str) -> None:
        if self._unjudged is None:
            return
        step, verdict = self._unjudged
        self._unjudged = None
        if not verdict.wait()["is_finite"]:
            raise NonFiniteGradientsError(
                f"step {step}: gradients are not finite (NaN or infinite). {fate}\n"
                "  Often the learning rate is too high "
                "(--optimizer.param_groups.0.optimizer_kwargs.lr),\n"
                "  or its warm-up too short (--lr_scheduler.warmup_steps)"
            )
