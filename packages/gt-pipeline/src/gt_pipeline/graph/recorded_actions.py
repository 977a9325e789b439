"""Actions of a stage as CUDA graphs: recorded once for each place of a microbatch, then replayed.

A recording reads and writes fixed addresses, and several microbatches are under way. So a stage has
*places*: each holds what one microbatch keeps between its forward and the last part of its backward
(``SlotMemory``). A microbatch takes the first free place at its forward, so that there are as many
as the schedule has live at once, and in every step the same. Each action is recorded for each place
that it meets:

- parameters and buffers are read where they are; gathered parameters are copied to memory that
  stays, since every UNSHARD makes others;
- what arrives is copied to memory of the action, before its launch;
- what is kept is copied to its place, and gradients are added to their sums, by the recording
  itself: an action is one launch. Only the sums outlive it, not each microbatch's gradients;
- what leaves the stage is copied from the recording, behind it: nobody knows for how long the
  receiver reads it.

All recordings of a stage share memory for what is gone when they end. That is sound in any order,
since nothing that outlives a recording lies there.

Why it is built so: docs/decisions/0025-recorded-and-offloading-stages.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from gt_passes.cuda_graphs.cuda_graph_replay import Recorder, Recording
from gt_passes.cuda_graphs.piece_memory import Place, without_repeats
from gt_passes.cuda_graphs.whole_recording import WholeRecording, whole_recording
from gt_passes.errors import CudaGraphAddressError
from gt_pipeline.graph._torch_internals import add_in_place, copy_all
from gt_pipeline.graph.action_graph import ActionGraph
from gt_pipeline.graph.gradient_accumulators import GradientAccumulators
from gt_pipeline.graph.slots import Slot, SlotKind
from gt_trace import BoxedFunction
from gt_trace.capture.captured_mode import as_captured

_KEPT: tuple[SlotKind, ...] = ("saved", "between")


@dataclass(eq=False, slots=True)
class SlotMemory:
    """What one microbatch keeps, by kind, at addresses that stay; empty before any recording."""

    kept: dict[SlotKind, list[Tensor]] = field(default_factory=dict)

    def holds(self, kind: SlotKind, values: Sequence[Tensor]) -> bool:
        """Whether these values are those that lie here."""
        held = self.kept.get(kind)
        return held is not None and all(a is b for a, b in zip(held, values, strict=True))


class StageRecordings:
    """What the recordings of one stage share: places of microbatches, and memory that stays."""

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self._actions: list[RecordedAction] = []
        self._places: list[SlotMemory] = []
        self._place_of: dict[int, int] = {}
        self._gathered: dict[Slot, Tensor] = {}
        self._num_forgotten = 0
        self.is_enabled = True
        """False where a whole step is recorded instead."""

    @property
    def is_used(self) -> bool:
        """Whether some action of the stage is to be recorded."""
        return self.is_enabled and bool(self._actions)

    @property
    def how(self) -> WholeRecording | None:
        """How actions are recorded; None if none is."""
        return self._actions[0].how if self._actions else None

    @property
    def num_places(self) -> int:
        """Microbatches that were under way at once, at most."""
        return len(self._places)

    def add(self, action: RecordedAction) -> None:
        """Count an action in."""
        self._actions.append(action)

    def recorder(self, how: WholeRecording) -> Recorder:
        """The recorder of all actions."""
        if self._recorder is None:
            self._recorder = how.new_recorder()
        return self._recorder

    def new(self, like: Tensor, how: WholeRecording) -> Tensor:
        """Memory for a tensor that no recording uses for anything else."""
        place = Place.of(like)
        return place.view(self.recorder(how).memory(place.end, like.device))

    def enter(self, microbatch: int) -> SlotMemory | None:
        """The place of a microbatch whose forward is about to run: the first one that is free.

        None if no action is to be recorded.
        """
        if not self.is_used:
            return None
        taken = {*self._place_of.values()}
        number = next(i for i in range(len(self._places) + 1) if i not in taken)
        if number == len(self._places):
            self._places.append(SlotMemory())
        self._place_of[microbatch] = number
        return self._places[number]

    def place(self, microbatch: int) -> SlotMemory | None:
        """The place of a microbatch that is under way; None if no action is to be recorded."""
        return self._places[self._place_of[microbatch]] if self.is_used else None

    def leave(self, microbatch: int) -> None:
        """Its backward is done."""
        if self.is_used:
            del self._place_of[microbatch]

    def clear(self) -> None:
        """No microbatch is under way any more."""
        self._place_of.clear()

    def standing(self, values: Mapping[Slot, Tensor]) -> dict[Slot, Tensor]:
        """The state that actions read, with gathered parameters where they were before."""
        gathered = {slot: value for slot, value in values.items() if slot.kind == "unsharded"}
        how = self._actions[0].how
        if not self._gathered:
            self._gathered = {slot: self.new(each, how) for slot, each in gathered.items()}
        if gathered:
            copy_all([self._gathered[slot] for slot in gathered], [*gathered.values()])
        return {**values, **self._gathered}

    def forget(self, moved: Sequence[str], *, at_most: int) -> None:
        """Drop all recordings, since something lies elsewhere now; the next runs record anew.

        Raises:
            CudaGraphAddressError: that happened too often.
        """
        self._num_forgotten += 1
        if self._num_forgotten >= at_most:
            raise CudaGraphAddressError(moved, num_recordings=self._num_forgotten)
        self.release()

    def release(self) -> None:
        """Drop all recordings, before process groups go: they keep communicators alive."""
        for action in self._actions:
            action.forget()
        # Microbatches under way keep what they have, and their actions run as they are.
        self._places = [SlotMemory() for _ in self._places]
        if self._recorder is not None:
            self._recorder.reset()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded:
    recording: Recording
    addresses: tuple[int, ...]
    """Of the state that it reads."""


class RecordedAction:
    """Runs one action's graph: as it is, then recorded for the places that it meets.

    Args:
        action: marked to be recorded.
        run: its graph, which takes a list.
        how: of the mark.
        recordings: of the stage.
    """

    def __init__(
        self,
        action: ActionGraph,
        run: BoxedFunction,
        how: WholeRecording,
        recordings: StageRecordings,
    ) -> None:
        self._action, self._run = action, run
        self.how, self._recordings = how, recordings
        recordings.add(self)
        self._num_static = action.num_static
        self._arriving = _positions(action.inputs, "argument", "output_gradient")
        self._reading = {kind: _positions(action.inputs, kind) for kind in _KEPT}
        inputs = {
            node: position
            for position, node in enumerate(action.graph_module.graph.find_nodes(op="placeholder"))
        }
        self._leaving = _positions(action.outputs, "output", "input_gradient")
        self._keeping = {kind: _positions(action.outputs, kind) for kind in _KEPT}
        self._gradients = _positions(action.outputs, "unsharded_gradient")
        results = action.result_nodes()
        self._examples = [node.meta["val"] for node in results]
        self._handed_on = {
            position: (kind, reading.index(inputs[node]))
            for position, node in enumerate(results)
            for kind, reading in self._reading.items()
            if inputs.get(node) in reading
        }
        """Results that lie in their place already: what of ``saved`` is left for dW."""

        self._num_runs = 0
        self._copies: dict[int, Tensor] = {}
        self._recorded: dict[tuple[SlotMemory | None, SlotMemory | None], _Recorded] = {}

    @staticmethod
    def of(
        action: ActionGraph, run: BoxedFunction, recordings: StageRecordings
    ) -> RecordedAction | None:
        """None for an action that is not marked to be recorded."""
        how = whole_recording(action.graph_module)
        if action.is_empty and action.kind == "BACKWARD_INPUT":
            how = recordings.how  # no pass sees it, and dW reads where it leaves things
        if how is None or not how.alone:
            return None
        return RecordedAction(action, run, how, recordings)

    def __call__(
        self,
        inputs: Sequence[Tensor],
        sums: GradientAccumulators,
        *,
        forward: SlotMemory | None,
        backward: SlotMemory | None,
    ) -> list[Tensor] | None:
        """Replay it; all results but gradients, which were added to ``sums``.

        None if it has to run as it is: to warm up, on what lies elsewhere, or where a whole step
        is recorded.

        Args:
            inputs: in the order of the action.
            sums: of the stage whose backward it runs.
            forward: place of the microbatch whose forward it runs, if it runs one.
            backward: the same of a backward.
        """
        if not self._recordings.is_enabled:
            return None
        self._num_runs += 1
        if self._num_runs <= self.how.num_warmup_runs or not self._lies_in(backward, inputs):
            return None
        recorded = self._recorded.get((forward, backward))
        if recorded is not None and (moved := self._moved(recorded, inputs)):
            self._recordings.forget(moved, at_most=self.how.max_recordings)
            return None
        standing = self._standing_sums(sums)
        if recorded is None:
            recorded = self._record(inputs, standing, forward, backward)
        else:
            self._copy_arriving(inputs)
        recorded.recording.replay()
        results: dict[int, Tensor] = {}
        for position, tensor in zip(self._leaving, recorded.recording.outputs, strict=True):
            results[position] = tensor.clone()
        for kind, positions in self._keeping.items():
            memory = self._memory_for(kind, forward, backward)
            results.update(zip(positions, memory, strict=True))
        return [results[position] for position in sorted(results)]

    def forget(self) -> None:
        """Drop the recordings, and the memory that they keep on the device."""
        self._recorded.clear()
        self._copies.clear()

    def _lies_in(self, backward: SlotMemory | None, inputs: Sequence[Tensor]) -> bool:
        return all(
            not positions
            or (backward is not None and backward.holds(kind, [inputs[at] for at in positions]))
            for kind, positions in self._reading.items()
        )

    def _moved(self, recorded: _Recorded, inputs: Sequence[Tensor]) -> list[str]:
        static = inputs[: self._num_static]
        return [
            slot.name
            for slot, tensor, address in zip(
                self._action.static_inputs, static, recorded.addresses, strict=True
            )
            if tensor.data_ptr() != address
        ]

    def _standing_sums(self, sums: GradientAccumulators) -> list[Tensor]:
        if not self._gradients:
            return []
        return sums.standing(
            lambda: [self._new(self._examples[position]) for position in self._gradients]
        )

    def _memory_for(
        self, kind: SlotKind, forward: SlotMemory | None, backward: SlotMemory | None
    ) -> list[Tensor]:
        """Where results of a kind are kept: a forward's ``saved``, a backward's ``between``."""
        positions = self._keeping[kind]
        if not positions:
            return []
        place = forward if kind == "saved" else backward
        assert place is not None
        if kind not in place.kept:
            place.kept[kind] = [
                place.kept[self._handed_on[at][0]][self._handed_on[at][1]]
                if at in self._handed_on
                else self._new(self._examples[at])
                for at in positions
            ]
        return place.kept[kind]

    def _new(self, like: Tensor) -> Tensor:
        return self._recordings.new(like, self.how)

    def _record(
        self,
        inputs: Sequence[Tensor],
        sums: list[Tensor],
        forward: SlotMemory | None,
        backward: SlotMemory | None,
    ) -> _Recorded:
        for position in self._arriving:
            if position not in self._copies:
                self._copies[position] = self._new(inputs[position])
        given = [self._copies.get(at, each) for at, each in enumerate(inputs)]
        self._copy_arriving(inputs)
        made = {
            kind: [at for at in self._keeping[kind] if at not in self._handed_on] for kind in _KEPT
        }
        rooms = [
            room
            for kind in _KEPT
            for at, room in zip(
                self._keeping[kind], self._memory_for(kind, forward, backward), strict=True
            )
            if at in made[kind]
        ]
        num_given, num_sums = len(given), len(sums)

        def piece(*tensors: Tensor) -> tuple[Tensor, ...]:
            with as_captured():
                results = self._run([*tensors[:num_given]])
            if num_sums:
                gradients = [results[at] for at in self._gradients]
                add_in_place([*tensors[num_given : num_given + num_sums]], gradients)
            kept = [results[at] for kind in _KEPT for at in made[kind]]
            if kept:
                copy_all([*tensors[num_given + num_sums :]], kept)
            return tuple(results[at] for at in self._leaving)

        recorder = self._recordings.recorder(self.how)
        recorded = recorder.record(piece, [*given, *sums, *rooms])
        addresses = tuple(each.data_ptr() for each in inputs[: self._num_static])
        found = _Recorded(recording=recorded.recording, addresses=addresses)
        self._recorded[forward, backward] = found
        return found

    def _copy_arriving(self, inputs: Sequence[Tensor]) -> None:
        for position, copy in self._copies.items():
            without_repeats(copy).copy_(without_repeats(inputs[position]), non_blocking=True)


def _positions(slots: Sequence[Slot], *kinds: SlotKind) -> tuple[int, ...]:
    return tuple(position for position, slot in enumerate(slots) if slot.kind in kinds)
