"""A recorder for machines without CUDA: its recordings behave as those of a GPU do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Piece = Callable[..., Sequence[torch.Tensor]]


class FakeRecording:
    """Replays by running the piece at its addresses, and leaves results at fixed addresses."""

    def __init__(self, piece: Piece, inputs: Sequence[torch.Tensor]) -> None:
        self._piece = piece
        self._inputs = list(inputs)
        # Recording computes nothing: this run is on copies, for the shapes of the results.
        self.outputs = [
            torch.full_like(result, 77) for result in piece(*(value.clone() for value in inputs))
        ]

    def replay(self) -> None:
        for kept, result in zip(self.outputs, self._piece(*self._inputs), strict=True):
            kept.copy_(result)


class FakeRecorder:
    """Counts what it is asked for."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_resets = 0
        self.num_copies = 0

    def warm_up(self, piece: Piece, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return piece(*inputs)

    def static_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_copies += 1
        return tensor.clone()

    def record(self, piece: Piece, inputs: Sequence[torch.Tensor]) -> FakeRecording:
        self.num_recorded += 1
        return FakeRecording(piece, inputs)

    def reset(self) -> None:
        self.num_resets += 1
