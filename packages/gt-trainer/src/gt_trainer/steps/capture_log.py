"""What a run says of its captures: what was captured, and what passes did not do, with reasons."""

from __future__ import annotations

import torch.distributed as dist
from torchtitan.tools.logging import logger

from gt_trainer.steps.pass_refusals import explain_refusals
from gt_trainer.steps.training_step import StepReport


class CaptureLog:
    """Logs every capture as it is made.

    Args:
        in_detail: whether to add tables of the passes, of their differences and of memory.
    """

    def __init__(self, *, in_detail: bool) -> None:
        self._in_detail = in_detail

    def __call__(self, report: StepReport) -> None:
        """Log one line for the capture, and on rank 0 what the user asked for and did not get."""
        logger.info(str(report))
        if dist.get_rank() != 0:
            return
        for passes in report.passes:
            for line in explain_refusals(passes):
                logger.warning(line)
            if self._in_detail:
                logger.info(f"Graph passes:\n{passes}\n{passes.differences()}")
        memory = report.memory_text() if self._in_detail else None
        if memory is not None:
            logger.info(memory)
