"""Run recorded pieces in place of the nodes they stand for.

Every step calls the pieces of a graph in the same order. The first steps run them as they are
(kernels are chosen and libraries make their workspaces then), the next one records all of them, and
from then on they are replayed. A recording reads and writes fixed addresses:

- parameters, buffers, constants and results of earlier pieces are read where they are, and every
  call checks that they still are there;
- other inputs are copied into memory that stays;
- results stay where the recording put them, so the next step overwrites them. The pass copies what
  leaves the step (``gt_passes.cuda_graphs.cuda_graphs``).

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

from gt_passes.errors import CudaGraphAddressError

_CallMode = Literal["run", "record", "replay"]


class Recording(Protocol):
    """One piece, recorded."""

    @property
    def outputs(self) -> Sequence[torch.Tensor]:
        """Where each replay leaves its results."""
        ...

    def replay(self) -> None:
        """Do what was recorded, on what its inputs hold now."""
        ...


class Recorder(Protocol):
    """Records pieces that will be replayed in the order in which they were recorded."""

    def warm_up(
        self, piece: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Run a piece as it is, and return its results."""
        ...

    def static_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of equal strides, in memory that stays."""
        ...

    def record(
        self, piece: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]
    ) -> Recording:
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

    def release(self) -> None:
        """Drop all recordings and their memory; the next step records anew.

        A recording of a collective keeps its communicator alive: release before destroying process
        groups.
        """
        for piece in self._pieces:
            piece.forget()
        self.recorder.reset()
        self._is_recorded = False
        self.mode = "run"


class ReplayedPiece:
    """The runner of one piece.

    Args:
        piece: what to record; a function of tensors that returns tensors.
        session: shared by the pieces of a graph, which are made in the order in which they run.
        input_names: for errors.
        static_inputs: positions of the inputs that keep their addresses.
    """

    def __init__(
        self,
        piece: Callable[..., Sequence[torch.Tensor]],
        session: ReplaySession,
        *,
        input_names: Sequence[str],
        static_inputs: frozenset[int],
    ) -> None:
        self.session = session
        self._piece = piece
        self._is_first = session.add(self)
        self._input_names = tuple(input_names)
        self._static_inputs = tuple(sorted(static_inputs))
        self._copied_inputs = tuple(
            position for position in range(len(self._input_names)) if position not in static_inputs
        )
        self._inputs: list[torch.Tensor] = []
        self._addresses: list[int] = []
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
            return session.recorder.warm_up(self._piece, args)
        if session.mode == "record":
            self._record(args)
        else:
            for position in self._copied_inputs:
                assert self._inputs[position].shape == args[position].shape  # or copy_ broadcasts
                self._inputs[position].copy_(args[position], non_blocking=True)
        assert self._recording is not None  # made now, or in an earlier step
        self._recording.replay()
        return self._recording.outputs

    def _moved_inputs(self, args: Sequence[torch.Tensor]) -> list[str]:
        return [
            self._input_names[position]
            for position, address in zip(self._static_inputs, self._addresses, strict=True)
            if args[position].data_ptr() != address
        ]

    def _record(self, args: Sequence[torch.Tensor]) -> None:
        recorder = self.session.recorder
        self._inputs = list(args)
        for position in self._copied_inputs:
            self._inputs[position] = recorder.static_copy(args[position])
        self._addresses = [args[position].data_ptr() for position in self._static_inputs]
        self._recording = recorder.record(self._piece, self._inputs)

    def forget(self) -> None:
        """Drop the recording, and the memory that it keeps."""
        self._recording = None
        self._inputs.clear()
        self._addresses.clear()
