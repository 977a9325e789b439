"""What a run says of its captures: what was captured, and what passes did not do, with reasons."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtitan.tools.logging import logger

from gt_passes import PassManagerReport, PassRecord
from gt_trainer.steps.layer_summary import layer_counts
from gt_trainer.steps.training_step import StepReport


class CaptureLog:
    """Logs every capture as it is made, and writes down those of rank 0.

    Args:
        path: the file of all captures so far, made anew with each; its folder is there by then.
        in_detail: whether to add tables of the passes, of their differences and of memory.
    """

    def __init__(self, path: Path, *, in_detail: bool) -> None:
        self._path = path
        self._in_detail = in_detail
        self._captures: list[dict[str, Any]] = []

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
        self._captures.append(
            {
                "captured": str(report),
                "graphs": [[_as_data(each) for each in graph.records] for graph in report.passes],
                "layers": [layer_counts(each) for each in report.graph_modules],
                "by_layer": [_before_and_after(graph) for graph in report.passes],
                "memory": memory,
            }
        )
        # Whole or not at all, for whoever reads it meanwhile.
        being_written = self._path.with_suffix(".tmp")
        being_written.write_text(json.dumps(self._captures) + "\n")
        being_written.replace(self._path)


def _as_data(record: PassRecord) -> dict[str, Any]:
    return {
        "pass": record.name,
        "operators": [record.before.num_ops, record.after.num_ops],
        "collective_bytes": [record.before.collective_bytes, record.after.collective_bytes],
        "done": dict(record.report.counts),
        "operator_differences": dict(record.op_count_differences),
        "refused": [] if record.only_cleans_up else [*_refusals(record)],
    }


def _before_and_after(graph: PassManagerReport) -> dict[str, object]:
    return {"before": graph.summary_before, "after": graph.summary_after}


def _refusals(record: PassRecord) -> Iterator[str]:
    """For each reason, how many places were left alone, and the first of them."""
    places: dict[str, list[str]] = {}
    for refusal in record.report.refusals:
        places.setdefault(refusal.reason, []).append(refusal.node_name)
    for reason, names in places.items():
        where = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        yield f"left {where} alone: {reason}"


def explain_refusals(report: PassManagerReport) -> Iterator[str]:
    """One line for each pass and reason: how many places were left alone, and the first of them.

    Not of passes that clean up: those refuse often, and nobody asked for a certain place of theirs.
    """
    for record in report.records:
        if not record.only_cleans_up:
            yield from (f"{record.name} {refusal}" for refusal in _refusals(record))
