"""A whole step as one CUDA graph: run as it is, then recorded, then replayed.

A recording reads and writes fixed addresses. State is read where it lies; a step's inputs are
copied to memory that stays, and its results from where the launch leaves them, so that they outlive
the next one. If state has moved, a step runs as it is, and the next one is recorded anew.

Why it is built so: docs/decisions/0025-recorded-and-offloading-stages.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from gt_passes.cuda_graphs.cuda_graph_replay import Recorder, Recording
from gt_passes.cuda_graphs.piece_memory import Place, without_repeats
from gt_passes.cuda_graphs.whole_recording import WholeRecording
from gt_passes.errors import CudaGraphAddressError
from gt_pipeline.graph._torch_internals import copy_all

Compute = Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]
"""A step as a function of the tensors of its state and of its inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded:
    recording: Recording
    inputs: Sequence[Tensor]
    """Where it reads them."""

    addresses: Mapping[str, int]
    """Of the state that it reads."""


class StepRecording:
    """Records a step after it has run as it is, and replays it.

    Args:
        how: all graphs of the step can be recorded.
    """

    def __init__(self, how: WholeRecording) -> None:
        self._how = how
        self._recorder: Recorder | None = None
        self._recorded: _Recorded | None = None
        self._num_run = 0
        self._num_forgotten = 0

    def run(
        self,
        state: Mapping[str, Tensor],
        read_inputs: Callable[[], Sequence[Tensor]],
        compute: Compute,
    ) -> list[Tensor] | None:
        """Results of a step, in memory that later steps leave alone.

        None if it has to run as it is: to warm up, or since its state lies elsewhere.

        Args:
            state: where it is now, by names for messages; the same names in every step.
            read_inputs: checks the inputs of the step, and gives them; called if it is replayed.
            compute: runs the step, to be recorded.

        Raises:
            CudaGraphAddressError: state was replaced too often.
        """
        if self._num_run < self._how.num_warmup_runs:
            return None
        # Another thread may drop it meanwhile: that of a step which has failed elsewhere.
        recorded = self._recorded
        if recorded is not None and self._has_moved(recorded, state):
            return None
        inputs = read_inputs()
        if recorded is None:
            self._recorded = recorded = self._record(state, inputs, compute)
        else:
            _copy(inputs, recorded.inputs)
        recorded.recording.replay()
        copies = [torch.empty_like(each) for each in recorded.recording.outputs]
        if copies:
            copy_all(copies, recorded.recording.outputs)
        return copies

    def has_run(self) -> None:
        """To be called when a step has run as it is: what is lazy has been done by then."""
        self._num_run += 1

    def memory(self, num_bytes: int, device: torch.device) -> Tensor:
        """Bytes that no recording uses for anything else; not while a step is being recorded."""
        if self._recorder is None:
            self._recorder = self._how.new_recorder()
        return self._recorder.memory(num_bytes, device)

    def release(self) -> None:
        """Drop the recording, before process groups go: it keeps communicators alive."""
        self._recorded = None
        if self._recorder is not None:
            self._recorder.reset()

    def _has_moved(self, recorded: _Recorded, state: Mapping[str, Tensor]) -> bool:
        """Whether what the recording reads lies elsewhere now; it is dropped then."""
        addresses, before = _addresses(state), recorded.addresses
        if addresses == before:
            return False
        self._num_forgotten += 1
        if self._num_forgotten >= self._how.max_recordings:
            moved = [name for name, address in addresses.items() if before.get(name) != address]
            raise CudaGraphAddressError(moved, num_recordings=self._num_forgotten)
        self.release()
        return True

    def _record(
        self, state: Mapping[str, Tensor], given: Sequence[Tensor], compute: Compute
    ) -> _Recorded:
        if self._recorder is None:
            self._recorder = self._how.new_recorder()
        places = [(Place.of(each), each.device) for each in given]
        inputs = [place.view(self._recorder.memory(place.end, on)) for place, on in places]
        _copy(given, inputs)

        def piece(*tensors: Tensor) -> tuple[Tensor, ...]:
            left = iter(tensors)
            return tuple(compute([*islice(left, len(state))], [*left]))

        recorded = self._recorder.record(piece, [*state.values(), *inputs])
        return _Recorded(recording=recorded.recording, inputs=inputs, addresses=_addresses(state))


def _addresses(state: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in state.items()}


def _copy(given: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    for source, target in zip(given, inputs, strict=True):
        without_repeats(target).copy_(without_repeats(source), non_blocking=True)
