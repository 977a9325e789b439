"""Trainers whose captures prepare their inputs, and one that does so before. Workers import this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from training_cases import (
    Case,
    RecordingTrainer,
    close,
    differing,
    use_this_group,
)

from gt_trace import InputPreparer, TraceInputs
from gt_trainer.steps.new_training_step import UnpreparedInputsError
from gt_trainer.trainer import GraphTrainer

CASE = Case(module="llama3", config="llama3_debugmodel")
CASES: Mapping[str, Case] = {
    "aot_fx_trace": CASE,
    "aot_joint": CASE,
    "reduce_once": replace(CASE, gradient_accumulation_steps=2),
    "pipeline": replace(
        CASE,
        parallelism={
            "pipeline_parallel_degree": 2,
            "pipeline_parallel_schedule": "1F1B",
            "pipeline_parallel_microbatch_size": 1,
        },
    ),
}


def shifted(tokens: torch.Tensor) -> torch.Tensor:
    return (tokens + 1) % 2048


class ShiftTokens(InputPreparer):
    """Makes other tokens of a batch, in the graph."""

    seen: ClassVar[list[tuple[int, ...]]] = []
    """Shapes of the batches that were captured."""

    def before_faking(self, inputs: TraceInputs) -> TraceInputs:
        if inputs.args[0] is not None:
            self.seen.append(tuple(inputs.args[0].shape))
        return inputs

    def inside_trace(self, inputs: TraceInputs) -> TraceInputs:
        tokens, *others = inputs.args
        if tokens is not None:
            tokens = shifted(tokens)
        return TraceInputs(args=(tokens, *others), kwargs=inputs.kwargs)


class PreparingTrainer(RecordingTrainer):
    """A trainer as a user derives it."""

    @dataclass(kw_only=True, slots=True)
    class Config(GraphTrainer.Config):
        """Has this trainer as its owner."""

    @classmethod
    def input_preparers(cls, config: GraphTrainer.Config) -> Sequence[InputPreparer]:
        return (ShiftTokens(),)


class ShiftingTrainer(RecordingTrainer):
    """The same, step by step and outside of the graph."""

    def post_dataloading_process(self, input_dict: Any, labels: torch.Tensor) -> Any:
        tokens, *others = super().post_dataloading_process(input_dict, labels)
        return (shifted(tokens), *others)


def trainer_like(
    kind: type[RecordingTrainer],
    mode: str,
    folder: str,
    options: Mapping[str, Any] = MappingProxyType({}),
    case: Case = CASE,
) -> RecordingTrainer:
    use_this_group()
    return kind(case.build(mode, folder, options=options))


def compare_with_shifted_batches(
    folder: str, name: str, mode: str, options: Mapping[str, Any]
) -> tuple[list[str], list[tuple[int, ...]], bool]:
    """What differs from eager training on prepared batches, the shapes prepared, and whether
    batches as they are would have other gradients."""
    case = CASES[name]
    ShiftTokens.seen.clear()
    eager = trainer_like(ShiftingTrainer, "none", f"{folder}/eager", {}, case)
    plain = trainer_like(RecordingTrainer, "none", f"{folder}/plain", {}, case)
    captured = trainer_like(PreparingTrainer, mode, f"{folder}/captured", options, case)
    for trainer in (eager, plain, captured):
        trainer.take_step()
    # Later passes of a pipeline add sums of microbatches to sums, and eager ones add microbatches.
    theirs, mine = eager.passes[case.gradient_accumulation_steps - 1], captured.passes[0]
    differences = differing(theirs.gradients, mine.gradients, "gradient")
    matters = differing(plain.passes[0].gradients, eager.passes[0].gradients, "") != []
    close(eager, plain, captured)
    return differences, list(ShiftTokens.seen), matters


def losses_with_stored_graphs(folder: str, mode: str) -> tuple[list[float], list[int]]:
    """Losses of a preparing, a plain and again a preparing trainer over one folder of graphs, and
    how many captures each made."""
    losses: list[float] = []
    captures: list[int] = []
    for number, kind in enumerate((PreparingTrainer, RecordingTrainer, PreparingTrainer)):
        options = {"artifacts": f"{folder}/graphs"}
        trainer = trainer_like(kind, mode, f"{folder}/{number}", options)
        trainer.take_step()
        losses.append(float(trainer.passes[0].loss))
        captures.append(sum(not each.is_loaded for each in trainer.training_step.reports))
        close(trainer)
    return losses, captures


def refusal(mode: str, folder: str, options: Mapping[str, Any]) -> str:
    """What a trainer with preparers says to options that capture nothing."""
    try:
        close(trainer_like(PreparingTrainer, mode, folder, options))
    except UnpreparedInputsError as error:
        return str(error)
    return "accepted"
