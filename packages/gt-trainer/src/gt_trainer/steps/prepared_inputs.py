"""A trainer's input preparers, for captures that take less than a whole step or take it otherwise.

A preparer changes the inputs of a training step: (tokens, labels, number of tokens, what else the
model takes). A call of the model has no labels, and a pipeline stage has a part of a microbatch.
The adapters here show a preparer the step's four arguments, with None for what the capture lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gt_trace import InputPreparer, TraceInputs
from gt_trace.errors import CaptureError


def for_model_calls(preparers: Sequence[InputPreparer]) -> tuple[InputPreparer, ...]:
    """Return the preparers for captures of ``model(tokens, **extra)``."""
    return tuple(map(_OfModelCall, preparers))


def for_stages(preparers: Sequence[InputPreparer]) -> tuple[InputPreparer, ...]:
    """Return the preparers for captures of pipeline stages, as ``capture_stage`` calls them."""
    return tuple(map(_OfStage, preparers))


@dataclass(frozen=True, slots=True)
class _Adapted(InputPreparer):
    preparer: InputPreparer

    def before_faking(self, inputs: TraceInputs) -> TraceInputs:
        return self.adapted(self.preparer.before_faking, inputs)

    def inside_trace(self, inputs: TraceInputs) -> TraceInputs:
        return self.adapted(self.preparer.inside_trace, inputs)

    def adapted(
        self, prepare: Callable[[TraceInputs], TraceInputs], inputs: TraceInputs
    ) -> TraceInputs:
        raise NotImplementedError

    def arguments(
        self, prepare: Callable[[TraceInputs], TraceInputs], *given: Any
    ) -> tuple[Any, Any, Any, dict[str, Any]]:
        """Prepare the arguments of a step, of which some are None.

        Raises:
            CaptureError: the preparer returns something that the capture does not take.
        """
        prepared = prepare(TraceInputs(args=given, kwargs={}))
        returned = tuple(prepared.args)
        names = ("tokens", "labels", "the number of tokens")
        problems = [
            f"{name}, which this capture does not take"
            for name, before, after in zip(names, given, returned, strict=False)
            if before is None and after is not None
        ]
        if len(returned) != len(given) or prepared.kwargs:
            problems.append(f"{len(returned)} arguments and keywords {sorted(prepared.kwargs)}")
        if problems:
            raise CaptureError(
                f"the input preparer {type(self.preparer).__name__} returns "
                f"{', and '.join(problems)}. Return (tokens, labels, number of tokens, dictionary "
                "of what else the model takes), with None where None was given"
            )
        tokens, labels, num_tokens, extra = returned
        return tokens, labels, num_tokens, extra


class _OfModelCall(_Adapted):
    def adapted(
        self, prepare: Callable[[TraceInputs], TraceInputs], inputs: TraceInputs
    ) -> TraceInputs:
        tokens, *others = inputs.args
        tokens, _, _, extra = self.arguments(prepare, tokens, None, None, dict(inputs.kwargs))
        return TraceInputs(args=(tokens, *others), kwargs=extra)


class _OfStage(_Adapted):
    def adapted(
        self, prepare: Callable[[TraceInputs], TraceInputs], inputs: TraceInputs
    ) -> TraceInputs:
        activations, args, kwargs, target, gradients = inputs.args
        tokens, *others = args or (None,)
        labels, loss_inputs = (None, {}) if target is None else target
        num_tokens = loss_inputs.get("global_valid_tokens")
        tokens, labels, num_tokens, kwargs = self.arguments(
            prepare, tokens, labels, num_tokens, dict(kwargs)
        )
        if target is not None:
            target = (labels, {**loss_inputs, "global_valid_tokens": num_tokens})
        args = (tokens, *others) if args else ()
        return TraceInputs(
            args=(activations, args, kwargs, target, gradients), kwargs=inputs.kwargs
        )
