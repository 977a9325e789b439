"""A trainer whose captured step prepares its inputs, and one that does so before. Workers import this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from training_cases import (
    Case,
    RecordingTrainer,
    close,
    differing_passes,
    same,
    use_this_group,
)

from gt_trace import InputPreparer, TraceInputs
from gt_trainer.steps.new_training_step import UnpreparedInputsError

CASE = Case(module="llama3", config="llama3_debugmodel")


def shifted(tokens: torch.Tensor) -> torch.Tensor:
    return (tokens + 1) % 2048


class ShiftTokens(InputPreparer):
    """Makes other tokens of a batch, in the graph."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def before_faking(self, inputs: TraceInputs) -> TraceInputs:
        self.seen.append(tuple(inputs.args[0].shape))
        return inputs

    def inside_trace(self, inputs: TraceInputs) -> TraceInputs:
        tokens, *others = inputs.args
        return TraceInputs(args=(shifted(tokens), *others), kwargs=inputs.kwargs)


class PreparingTrainer(RecordingTrainer):
    """What somebody derives from the trainer."""

    def input_preparers(self) -> Sequence[InputPreparer]:
        self.preparer = ShiftTokens()
        return (self.preparer,)


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
) -> RecordingTrainer:
    use_this_group()
    return kind(CASE.build(mode, folder, options=options))


def compare_with_shifted_batches(folder: str) -> tuple[list[str], list[tuple[int, ...]], bool]:
    """What differs from eager training on prepared batches, the shapes prepared, and whether
    batches as they are would have another loss."""
    eager = trainer_like(ShiftingTrainer, "none", f"{folder}/eager")
    plain = trainer_like(RecordingTrainer, "none", f"{folder}/plain")
    captured = trainer_like(PreparingTrainer, "aot_fx_trace", f"{folder}/captured")
    assert isinstance(captured, PreparingTrainer)
    for trainer in (eager, plain, captured):
        trainer.take_step()
        trainer.take_step()
    differences = [
        each
        for step, (a, b) in enumerate(zip(eager.passes, captured.passes, strict=True))
        for each in differing_passes(a, b, f"step {step}")
    ]
    matters = not same(plain.passes[0].loss, captured.passes[0].loss)
    close(eager, plain, captured)
    return differences, captured.preparer.seen, matters


def refusal(mode: str, folder: str, options: Mapping[str, Any]) -> str:
    """What a trainer with preparers says to options that would leave them out."""
    try:
        close(trainer_like(PreparingTrainer, mode, folder, options))
    except UnpreparedInputsError as error:
        return str(error)
    return "accepted"
