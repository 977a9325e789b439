"""A recorder for machines without CUDA: its recordings behave as those of a GPU do."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from gt_passes.cuda_graphs.cuda_graph_replay import Recorded

Piece = Callable[..., Sequence[torch.Tensor]]


class FakeRecording:
    """Replays by running the piece at its addresses, and leaves results at fixed addresses."""

    def __init__(
        self, piece: Piece, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        self._piece = piece
        # As a kernel knows addresses: without keeping anybody's memory from being used again.
        self._inputs = [_unowned(value) for value in inputs]
        self.outputs = [_unowned(value) for value in outputs]

    def replay(self) -> None:
        for kept, result in zip(self.outputs, self._piece(*self._inputs), strict=True):
            kept.copy_(result)


class FakeRecorder:
    """Counts what it is asked for, and gives memory that was let go to later recordings."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_resets = 0
        self.memory_bytes = 0
        self._blocks: list[torch.Tensor] = []
        self._free: list[torch.Tensor] = []

    @property
    def bytes_of_results(self) -> int:
        """Memory that recordings have for results, whether in use or free."""
        return sum(block.numel() * block.element_size() for block in self._blocks)

    def warm_up(self, piece: Piece, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return piece(*inputs)

    def memory(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        self.memory_bytes += num_bytes
        return torch.full((num_bytes,), 0xFF, dtype=torch.uint8, device=device)  # NaN

    def record(self, piece: Piece, inputs: Sequence[torch.Tensor]) -> Recorded:
        self.num_recorded += 1
        # Recording computes nothing: this run is on copies, for the shapes of the results.
        shapes = piece(*(value.clone() for value in inputs))
        owned = [self._allocated(result) for result in shapes]
        return Recorded(recording=FakeRecording(piece, inputs, owned), outputs=owned)

    def reset(self) -> None:
        self.num_resets += 1
        self._blocks, self._free = [], []

    def _allocated(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor whose memory is free again when nobody holds it any more."""
        fitting = [number for number, block in enumerate(self._free) if _is_alike(block, like)]
        if fitting:
            block = self._free.pop(fitting[0])
        else:
            block = torch.full_like(like, 77)
            self._blocks.append(block)
        owned = _unowned(block)
        weakref.finalize(owned, self._free.append, block)
        return owned


def _unowned(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor over the same memory."""
    return torch.empty(0, dtype=tensor.dtype).set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def _is_alike(block: torch.Tensor, like: torch.Tensor) -> bool:
    return (block.shape, block.stride(), block.dtype) == (like.shape, like.stride(), like.dtype)
