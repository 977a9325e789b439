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
    """The loss of a step is NaN or infinite on some rank, though all gradients are finite."""


class StepCheck:
    """Ends a run if gradients or losses of any rank are not finite, before a step is saved.

    All ranks judge a step together, those of a pipeline too that have no loss: a rank that ended
    alone would leave the others in the next step's collectives.

    On CPU a step is judged before its update. Elsewhere that would leave the device without work in
    every step: a step is judged before the update of the next one, which the device has by then
    been given to compute, and in ``settle``. Until then its update is in memory, nowhere else.

    Args:
        device: where the ranks communicate.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._verdict: tuple[int, HostCopy] | None = None

    def check(self, parameters: Iterable[torch.Tensor], loss: torch.Tensor, *, step: int) -> None:
        """Judge the step before, or on CPU this one. All ranks call this together.

        Args:
            parameters: those of this rank, gradients accumulated and clipped. Clipping makes all
                elements NaN if the norm was NaN, and leaves NaN where an element was infinite.
            loss: one element, this rank's share; any finite number where there is none.
            step: the step whose update they are for.

        Raises:
            NonFiniteGradientsError: On every rank, naming the step that is judged.
            NonFiniteLossError: Likewise.
        """
        self.settle()
        gradients = [local_part(each.grad) for each in parameters if each.grad is not None]
        # The largest magnitude, NaN if one is. Of a small parameter, a shard may be empty.
        gradients = [each for each in gradients if each.numel()]
        largest = torch.nn.utils.get_total_norm(gradients, math.inf)
        are_finite = torch.stack(
            [
                torch.isfinite(each).to(self._device, torch.int32).reshape(())
                for each in (largest, local_part(loss))
            ]
        )
        dist.all_reduce(are_finite, dist.ReduceOp.MIN)
        verdict = copy_to_host({"gradients": are_finite[0], "loss": are_finite[1]})
        self._verdict = (step, verdict)
        if verdict.copied is None:
            self._judge(fate="Its update was not made, and nothing of this step was saved.")

    def settle(self) -> None:
        """Judge the last step that was checked: call it before anything of it is saved.

        Waits until that step has been computed.

        Raises:
            NonFiniteGradientsError: On every rank, if they all call this.
            NonFiniteLossError: Likewise.
        """
        self._judge(fate="Nothing of this step was saved.")

    def _judge(self, *, fate: str) -> None:
        if self._verdict is None:
            return
        step, verdict = self._verdict
        self._verdict = None
        are_finite = verdict.wait()
        if not are_finite["gradients"]:
            raise NonFiniteGradientsError(
                f"step {step}: gradients are not finite (NaN or infinite). {fate}\n"
                "  Often the learning rate is too high "
                "(--optimizer.param_groups.0.optimizer_kwargs.lr),\n"
                "  or its warm-up too short (--lr_scheduler.warmup_steps)"
            )
        if not are_finite["loss"]:
            raise NonFiniteLossError(
                f"step {step}: the loss is not finite (NaN or infinite), though its gradients are. "
                f"{fate}"
            )
