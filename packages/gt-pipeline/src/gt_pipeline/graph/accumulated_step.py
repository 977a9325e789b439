"""A step of several microbatches that gather and reduce once, bound to a module's live state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gt_pipeline.graph.accumulation_cut import AccumulationGraphs, MicrobatchRole
from gt_pipeline.graph.action_graph import boxed
from gt_trace.capture.bound_inputs import BoundInputs
from gt_trace.capture.captured_mode import ModeGuard, as_captured
from gt_trace.capture.traced_step import wrapped_leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class AccumulatedResult:
    """What a step of several microbatches gives, as leaves of the captured output tree."""

    results: tuple[tuple[Any, ...], ...]
    """The leading leaves of each microbatch."""

    gradients: tuple[Any, ...]
    """The other leaves, of all microbatches together."""


class AccumulatedStep:
    """Runs the graphs of ``cut_accumulation``, after passes if there are any.

    What was gathered is let go as the last microbatch has used it, a sum as it is reduced, and a
    microbatch's inputs before the next ones are asked for.

    Args:
        graphs: of a step.
        module: the captured module, or one of the same structure and layouts.

    Raises:
        gt_trace.StateMismatchError: the module's state or mode is not the captured one.
    """

    def __init__(self, graphs: AccumulationGraphs, module: nn.Module) -> None:
        traced = graphs.traced
        self._graphs = graphs
        self._num_static = traced.num_static_inputs
        self._layouts = traced.output_layouts
        self._inputs = BoundInputs(traced, module)
        self._guard = ModeGuard(traced.mode, module)
        self._run = {each.role: boxed(each.graph_module) for each in graphs.graphs}

    def __call__(self, microbatches: Iterable[tuple[Any, ...]]) -> AccumulatedResult:
        """Run a step.

        Args:
            microbatches: the arguments of each; one is asked for after another, when the ones
                before have run.

        Raises:
            gt_trace.InputMismatchError: one differs from the captured one in structure, shape,
                dtype, layout or constant value. If it is the first, nothing has run.
            gt_trace.StateMismatchError: as for the class.
            ValueError: there are not as many as the graphs are for.
        """
        graphs, last = self._graphs, self._graphs.num_microbatches - 1
        results: list[tuple[Any, ...]] = []
        shared: list[Tensor] = []
        sums: list[Tensor] = []
        for number, microbatch in enumerate(microbatches):
            if number > last:
                raise ValueError(f"more microbatches were given than the {last + 1} captured")
            plain = self._inputs.plain_tensors(microbatch, {})
            del microbatch
            state, arguments = plain[: self._num_static], plain[self._num_static :]
            inputs = [*state, *shared, *arguments, *sums]
            del plain, state, arguments
            sums.clear()
            if number == 0:
                self._guard.check(self._inputs.version)
            if number == last:
                shared.clear()
            with as_captured():
                outputs = list(self._run[self._role(number)](inputs))
            leaves = self._leading(outputs)
            results.append(leaves)
            if number == 0:
                shared = _cut_off(outputs, graphs.num_gathered)
            if number < last:
                sums = _cut_off(outputs, graphs.num_sums)
        if len(results) != last + 1:
            raise ValueError(f"{len(results)} microbatches were given, and {last + 1} captured")
        return AccumulatedResult(
            results=tuple(results),
            gradients=tuple(wrapped_leaves(outputs, self._layouts[graphs.num_results :])),
        )

    def _role(self, number: int) -> MicrobatchRole:
        if number == 0:
            return "first"
        return "last" if number == self._graphs.num_microbatches - 1 else "further"

    def _leading(self, outputs: list[Any]) -> tuple[Any, ...]:
        """Take a microbatch's own results off the outputs of its graph."""
        layouts = self._layouts[: self._graphs.num_results]
        plain = outputs[: self._graphs.num_plain_results]
        del outputs[: self._graphs.num_plain_results]
        return tuple(wrapped_leaves(plain, layouts))


def _cut_off(values: list[Any], count: int) -> list[Any]:
    """Take the last values of a list."""
    start = len(values) - count
    found = values[start:]
    del values[start:]
    return found
