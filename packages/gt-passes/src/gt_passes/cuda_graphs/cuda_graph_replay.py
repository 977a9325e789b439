"""Run recorded pieces in place of the nodes they stand for.

Every step calls the pieces of a graph in the same order. The first steps run them as they are
(kernels are chosen and libraries make their workspaces then), the next one records all of them, and
from then on they are replayed. A recording reads and writes fixed addresses:

- parameters, buffers, constants and results of earlier pieces are read where they are, and every
  call checks that they still are there;
- other inputs are copied into memory that stays (``piece_memory``);
- results stay where the recording put them, so the next step overwrites them. The pass copies what
  leaves the step (``gt_passes.cuda_graphs.cuda_graphs``).

The step that records gets results that own their memory. When their last reader is done they are
gone, and pieces that are recorded later use that memory again: every step runs in the same order,
so by then nobody reads it. Recordings only remember where it was.

If an address has changed (a checkpoint replaced a parameter), the step goes on without recordings
and the next one records all pieces anew, in fresh memory: pieces share memory in the order in which
they were recorded, and a single new one could land where another keeps its intermediates.

What records is a ``Recorder``, so that all of this is tested on machines without CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from gt_passes.cuda_graphs.piece_memory import PieceMemory, Place, without_repeats
from gt_passes.errors import CudaGraphAddressError

_CallMode = Literal["run", "record", "replay"]


class Recording(Protocol):
    """One piece, recorded."""

    @property
    def outputs(self) -> Sequence[torch.Tensor]:
        """Where each replay leaves its results. They do not own that memory."""
        ...

    def replay(self) -> None:
        """Do what was recorded, on what its inputs hold now."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What recording a piece gives."""

    recording: Recording

    outputs: Sequence[torch.Tensor]
    """The results at their addresses, for the step that records. They own their memory: once they
    are gone, recordings that are made later may use it."""


class Recorder(Protocol):
    """Records pieces that will be replayed in the order in which they were recorded."""

    def warm_up(
        self, piece: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Run a piece as it is, and return its results."""
        ...

    def memory(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Bytes, uint8 and one-dimensional, that no recording uses for anything else.

        Host memory is such that a device copies to it on its own.
        """
        ...

    def record(
        self, piece: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]
    ) -> Recorded:
        """Record a piece at the addresses of ``inputs``. Computes nothing yet."""
        ...

    def reset(self) -> None:
        """Forget all recordings: the next ones are made in fresh memory."""
        ...


@dataclass(slots=True)
class ReplaySession:
    """What the pieces of one graph share: the recorder, and what the current step does.

    Args:
        recorder: records the pieces.
        num_warmup_steps: steps to run before recording; at least 1.
        max_recordings: how often addresses may change before that is an error.
    """

    recorder: Recorder
    num_warmup_steps: int = 1
    max_recordings: int = 8
    num_recordings: int = 0
    """How often the pieces have been recorded so far."""

    mode: _CallMode = "run"
    """What the pieces do in the current step."""

    _num_steps: int = 0
    _is_recorded: bool = False
    _pieces: list[ReplayedPiece] = field(default_factory=list)
    _shared_memory: torch.Tensor | None = None

    def add(self, piece: ReplayedPiece) -> bool:
        """Count a piece in; returns whether it is the first, with which a step begins."""
        self._pieces.append(piece)
        return len(self._pieces) == 1

    def begin_step(self) -> None:
        """The first piece of a step is about to run."""
        self._num_steps += 1
        if self._num_steps <= self.num_warmup_steps:
            self.mode = "run"
        elif self._is_recorded:
            self.mode = "replay"
        else:
            self.release()
            self.mode = "record"
            self.num_recordings += 1
            self._is_recorded = True

    def invalidate(self, moved: Sequence[str]) -> None:
        """Addresses have changed: run the rest of the step, and record anew in the next.

        Raises:
            CudaGraphAddressError: they have changed too often.
        """
        if self.num_recordings >= self.max_recordings:
            raise CudaGraphAddressError(moved, num_recordings=self.num_recordings)
        self._is_recorded = False
        self.mode = "run"

    def shared_memory(self, device: torch.device) -> torch.Tensor:
        """The bytes into which every piece copies inputs, each before it runs."""
        if self._shared_memory is None:
            num_bytes = max(piece.memory.shared_bytes for piece in self._pieces)
            self._shared_memory = self.recorder.memory(num_bytes, device)
        assert self._shared_memory.device == device  # recordings are of one device
        return self._shared_memory

    def release(self) -> None:
        """Drop all recordings and their memory; the next step records anew.

        A recording of a collective keeps its communicator alive: release before destroying process
        groups.
        """
        for piece in self._pieces:
            piece.forget()
        self._shared_memory = None
        self.recorder.reset()
        self._is_recorded = False
        self.mode = "run"


class ReplayedPiece:
    """The runner of one piece.

    Args:
        piece: what to record; a function of tensors that returns tensors.
        session: shared by the pieces of a graph, which are made in the order in which they run.
        memory: where the inputs go that do not keep their addresses. If it has rooms, ``piece``
            takes them behind its other inputs.
        input_names: for errors; without the rooms.
    """

    def __init__(
        self,
        piece: Callable[..., Sequence[torch.Tensor]],
        session: ReplaySession,
        *,
        memory: PieceMemory,
        input_names: Sequence[str],
    ) -> None:
        self.session = session
        self.memory = memory
        self._piece = piece
        self._is_first = session.add(self)
        self._input_names = tuple(input_names)
        copied = {position for position, _ in (*memory.shared_inputs, *memory.own_inputs)}
        self._static_inputs = tuple(
            position for position in range(len(self._input_names)) if position not in copied
        )
        self._copies: dict[int, torch.Tensor] = {}  # what of them is stored
        self._addresses: list[int] = []
        self._rooms: list[torch.Tensor] = []
        self._recording: Recording | None = None

    def __call__(self, *args: Any) -> Sequence[torch.Tensor]:
        """Run, record or replay the piece, as the session says."""
        session = self.session
        if self._is_first:
            session.begin_step()
        if session.mode == "replay":
            moved = self._moved_inputs(args)
            if moved:
                session.invalidate(moved)
        if session.mode == "run":
            return session.recorder.warm_up(self._piece, [*args, *self._given_rooms()])
        if session.mode == "record":
            return self._record(args)
        for position, copy in self._copies.items():
            given = without_repeats(args[position])
            assert copy.shape == given.shape  # or copy_ broadcasts
            copy.copy_(given, non_blocking=True)
        assert self._recording is not None  # made in an earlier step
        self._recording.replay()
        return self._recording.outputs

    def _moved_inputs(self, args: Sequence[torch.Tensor]) -> list[str]:
        return [
            self._input_names[position]
            for position, address in zip(self._static_inputs, self._addresses, strict=True)
            if args[position].data_ptr() != address
        ]

    def _record(self, args: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        session, memory = self.session, self.memory
        inputs = list(args)
        if memory.shared_inputs:
            (position, _), *_ = memory.shared_inputs
            shared = session.shared_memory(args[position].device)
            self._place(memory.shared_inputs, shared, inputs)
        if memory.own_inputs:
            (position, _), *_ = memory.own_inputs
            own = session.recorder.memory(memory.own_bytes, args[position].device)
            self._place(memory.own_inputs, own, inputs)
        # Addresses, not tensors: what nobody else holds is to be gone when its last reader is done.
        self._addresses = [args[position].data_ptr() for position in self._static_inputs]
        recorded = session.recorder.record(self._piece, [*inputs, *self._given_rooms()])
        self._recording = recorded.recording
        self._recording.replay()
        return recorded.outputs

    def _place(
        self,
        places: Sequence[tuple[int, Place]],
        memory: torch.Tensor,
        inputs: list[torch.Tensor],
    ) -> None:
        for position, place in places:
            placed = place.view(memory)
            self._copies[position] = without_repeats(placed)
            self._copies[position].copy_(without_repeats(inputs[position]))
            inputs[position] = placed

    def _given_rooms(self) -> Sequence[torch.Tensor]:
        """The rooms in host memory, made once: a copy of the step before may still be under way."""
        if self.memory.rooms and not self._rooms:
            host = self.session.recorder.memory(self.memory.room_bytes, torch.device("cpu"))
            self._rooms = [room.view(host) for room in self.memory.rooms]
        return self._rooms

    def forget(self) -> None:
        """Drop the recording, and the memory that it keeps on the device."""
        self._recording = None
        self._copies.clear()
        self._addresses.clear()
