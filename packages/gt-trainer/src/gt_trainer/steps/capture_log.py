"""What a run says of its captures: what was captured, and what passes did not do, with reasons."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torchtitan.tools.logging import logger

from gt_passes import PassManagerReport
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


def explain_refusals(report: PassManagerReport) -> Iterator[str]:
    """One line for each pass and reason: how many places were left alone, and the first of them.

    Not of passes that clean up: those refuse often, and nobody asked for a certain place of theirs.
    """
    for record in report.records:
        if record.only_cleans_up:
            continue
        places: dict[str, list[str]] = {}
        for refusal in record.report.refusals:
            places.setdefault(refusal.reason, []).append(refusal.node_name)
        for reason, names in places.items():
            where = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
            yield f"{record.name} left {where} alone: {reason}"
