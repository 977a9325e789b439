"""A step of several microbatches that gather and reduce once, bound to a module's live state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from gt_passes.cuda_graphs.piece_memory import PieceMemory, with_rooms
from gt_passes.cuda_graphs.whole_recording import whole_recording
from gt_pipeline.graph.accumulation_cut import AccumulationGraphs, MicrobatchRole
from gt_pipeline.graph.step_recording import StepRecording
from gt_trace import BoxedFunction, boxed
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

    Where a pass has marked all graphs to be recorded (``gt_passes.CudaGraphs``), a step is recorded
    after the first one as one CUDA graph, and replayed by one launch. Then all microbatches are
    asked for before a step, the first one too, and copied to where it reads them.

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
        self._runs = {each.role: boxed(each.graph_module) for each in graphs.graphs}
        marks = [whole_recording(each.graph_module) for each in graphs.graphs]
        how = marks[0]
        self._recorded_runs: dict[MicrobatchRole, BoxedFunction] = {}
        self._recording = StepRecording(how) if how is not None and None not in marks else None

    def __call__(self, microbatches: Iterable[tuple[Any, ...]]) -> AccumulatedResult:
        """Run a step.

        Args:
            microbatches: the arguments of each; one is asked for after another, when the ones
                before have run, unless steps are recorded.

        Raises:
            gt_trace.InputMismatchError: one differs from the captured one in structure, shape,
                dtype, layout or constant value. If it is the first, or the step is replayed,
                nothing has run.
            gt_trace.StateMismatchError: as for the class.
            ValueError: there are not as many as the graphs are for.
            gt_passes.CudaGraphAddressError: parameters of a step that is replayed were replaced
                too often.
        """
        plain = None
        if self._recording is not None:
            microbatches = list(microbatches)
            plain = self._replay(self._recording, microbatches)
        if plain is None:
            plain = self._compute(map(self._plain_tensors, microbatches), self._runs)
            if self._recording is not None:
                self._recording.has_run()
        graphs = self._graphs
        own = [_cut_off(plain, graphs.num_plain_results) for _ in range(graphs.num_microbatches)]
        layouts = self._layouts[: graphs.num_results]
        return AccumulatedResult(
            results=tuple(tuple(wrapped_leaves(each, layouts)) for each in own),
            gradients=tuple(wrapped_leaves(plain, self._layouts[graphs.num_results :])),
        )

    @property
    def left_alone(self) -> tuple[MicrobatchRole, ...]:
        """Whose graphs keep the step from being recorded, where a pass has marked others."""
        marks = {
            each.role: whole_recording(each.graph_module) is not None
            for each in self._graphs.graphs
        }
        return tuple(role for role, is_marked in marks.items() if any(marks.values()) > is_marked)

    def release(self) -> None:
        """Drop the recording, if any, before process groups go: it keeps communicators alive."""
        self._recorded_runs.clear()
        if self._recording is not None:
            self._recording.release()

    def _plain_tensors(self, microbatch: tuple[Any, ...]) -> list[Tensor]:
        return self._inputs.plain_tensors(microbatch, {})

    def _compute(
        self, microbatches: Iterable[list[Tensor]], runs: Mapping[MicrobatchRole, BoxedFunction]
    ) -> list[Any]:
        """Plain results of every microbatch, then plain gradients.

        Args:
            microbatches: state and arguments of each, in lists that are emptied.
            runs: the graphs.
        """
        graphs, last = self._graphs, self._graphs.num_microbatches - 1
        results: list[Any] = []
        shared: list[Tensor] = []
        sums: list[Tensor] = []
        number = -1
        for number, plain in enumerate(microbatches):
            if number > last:
                raise ValueError(f"more microbatches were given than the {last + 1} captured")
            inputs = [*plain[: self._num_static], *shared, *plain[self._num_static :], *sums]
            plain.clear()
            sums.clear()
            if number == 0:
                self._guard.check(self._inputs.version)
            if number == last:
                shared.clear()
            with as_captured():
                outputs = list(runs[self._role(number)](inputs))
            results += _cut_off(outputs, graphs.num_plain_results)
            if number < last:
                sums = _cut_off(outputs, graphs.num_sums)
            if number == 0:
                shared = outputs
        self._check_count(number + 1)
        return [*results, *outputs]

    def _check_count(self, given: int) -> None:
        if given != (captured := self._graphs.num_microbatches):
            raise ValueError(f"{given} microbatches were given, and {captured} captured")

    def _role(self, number: int) -> MicrobatchRole:
        if number == 0:
            return "first"
        return "last" if number == self._graphs.num_microbatches - 1 else "further"

    def _replay(
        self, recording: StepRecording, microbatches: Sequence[tuple[Any, ...]]
    ) -> list[Any] | None:
        """The same by one launch; None if the step has to run as it is."""
        self._check_count(len(microbatches))
        traced = self._graphs.traced
        state = self._inputs.static_tensors()
        names = [f"{each.name}, {each.leaf}" for each in traced.inputs[: self._num_static]]

        def read_inputs() -> list[Tensor]:
            read = [self._plain_tensors(each)[self._num_static :] for each in microbatches]
            self._guard.check(self._inputs.version)
            if not self._recorded_runs:
                self._recorded_runs = {
                    each.role: _recordable(each.graph_module, recording)
                    for each in self._graphs.graphs
                }
            return [tensor for each in read for tensor in each]

        def compute(state: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
            num_each = len(inputs) // len(microbatches)
            plain = [
                [*state, *inputs[number * num_each : (number + 1) * num_each]]
                for number in range(len(microbatches))
            ]
            leaves = self._compute(plain, self._recorded_runs)
            return [leaf for leaf in leaves if leaf is not None]

        results = recording.run(dict(zip(names, state, strict=True)), read_inputs, compute)
        if results is None:
            return None
        # A parameter that is not used has no gradient, and a recording leaves tensors alone.
        left = iter(results)
        graph = self._graphs.last.graph_module.graph
        outputs: Any = graph.output_node().args[0]
        own, gradients = outputs[: (n := self._graphs.num_plain_results)], outputs[n:]
        every = [*own] * self._graphs.num_microbatches + [*gradients]
        return [None if node is None else next(left) for node in every]


def _recordable(graph_module: GraphModule, recording: StepRecording) -> BoxedFunction:
    """A graph as a function that copies to the host, if it does, to memory that stays."""
    every_input = range(len(graph_module.graph.find_nodes(op="placeholder")))
    needed = PieceMemory.of(graph_module, static_inputs=every_input)
    run = boxed(with_rooms(graph_module))
    memory = recording.memory(needed.room_bytes, torch.device("cpu"))
    rooms = [room.view(memory) for room in needed.rooms]

    def run_with_rooms(inputs: list[Any]) -> Sequence[Any]:
        inputs += rooms
        return run(inputs)

    return run_with_rooms


def _cut_off(values: list[Any], count: int) -> list[Any]:
    """Take the first values of a list."""
    found = values[:count]
    del values[:count]
    return found
