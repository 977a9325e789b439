"""One eager run against several captured ones that differ in options. Workers import this by name.

The eager run is recorded once, as it costs as much as a captured one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from training_cases import (
    NUM_STEPS,
    Case,
    Pass,
    RecordingTrainer,
    close,
    differing,
    differing_passes,
    expert_regions,
    take_unseen,
    trainer_of,
)

from gt_passes import PassRecord

__all__ = ["Variant", "VariantResult", "compare_variants"]

Variant = Mapping[str, Any]
"""Options of ``--compile`` besides those of the eager run; ``mode`` among them if it matters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantResult:
    """What a rank found of one variant."""

    differences: tuple[str, ...]
    """Every loss, gradient, buffer and parameter that is not bitwise that of the eager run."""

    losses: tuple[float, ...]
    largest_difference: float
    """Over the losses and gradients of all passes: the largest difference in a tensor, divided by
    the largest magnitude in it."""

    largest_first_difference: float
    """Likewise of the first pass alone, in which both runs still have the same weights."""

    passes: tuple[str, ...]
    """Of the recipe that ran."""

    changed: frozenset[str]
    """Passes that edited the graph."""

    verified: bool
    stamped: bool
    """Whether layers of every capture were stamped."""

    expert_regions: frozenset[tuple[str | None, ...]]
    """Phase, region and exchange of nodes in routed experts."""


@dataclass(slots=True)
class _History:
    passes: list[Pass]
    parameters: dict[str, torch.Tensor]
    trainer: RecordingTrainer


def compare_variants(
    case: Case, folder: str, variants: Mapping[str, Variant]
) -> dict[str, VariantResult]:
    """Train eagerly, then once for each variant, from the same weights on the same data.

    Five optimizer steps, then batches that the capture has not seen.
    """
    eager = _train(case, "none", f"{folder}/eager", options={})
    close(eager.trainer)
    results = {}
    for number, (name, variant) in enumerate(variants.items()):
        options = dict(variant)
        mode = options.pop("mode", "aot_fx_trace")
        run = _train(case, mode, f"{folder}/{number}", options=options)
        results[name] = _compare(eager, run)
        close(run.trainer)
    return results


def _train(case: Case, mode: str, folder: str, *, options: Variant) -> _History:
    trainer = trainer_of(case, mode, folder, options=options)
    for _ in range(NUM_STEPS):
        trainer.take_step()
    parameters = trainer.parameters()
    take_unseen(trainer)
    return _History(passes=trainer.passes, parameters=parameters, trainer=trainer)


def _compare(eager: _History, run: _History) -> VariantResult:
    differences: list[str] = []
    largest = []
    for number, (a, b) in enumerate(zip(eager.passes, run.passes, strict=True), start=1):
        differences += differing_passes(a, b, f"pass {number}")
        both = [(a.loss, b.loss)]
        both += [(a.gradients[n], b.gradients[n]) for n in a.gradients.keys() & b.gradients.keys()]
        largest.append(max(_relative_difference(*pair) for pair in both))
    differences += differing(eager.parameters, run.parameters, "final parameter")
    records: tuple[PassRecord, ...] = tuple(
        record
        for report in run.trainer.training_step.reports
        for pipeline in report.passes
        for record in pipeline.records
    )
    return VariantResult(
        differences=tuple(differences),
        losses=tuple(each.loss.item() for each in run.passes),
        largest_difference=max(largest),
        largest_first_difference=largest[0],
        passes=tuple(record.name for record in records),
        changed=frozenset(record.name for record in records if record.report.changed),
        verified=all(
            p.verified for report in run.trainer.training_step.reports for p in report.passes
        ),
        stamped=all(_is_stamped(report) for report in run.trainer.training_step.reports),
        expert_regions=expert_regions(run.trainer),
    )


def _is_stamped(report: Any) -> bool:
    stamping = getattr(report, "stamping", None)
    return stamping is not None and stamping.stamped


def _relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.numel() == 0:
        return 0.0
    scale = a.abs().max().item()
    difference = (a.double() - b.double()).abs().max().item()
    return difference / scale if scale > 0 else difference
