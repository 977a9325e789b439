"""Measuring devices for tests of passes, and for those who write passes of their own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from gt_passes._torch_internals import StorageWeakRef, TorchDispatchMode, pytree
from gt_passes.cuda_graphs.cuda_graph_replay import Recorded


def measure_peak_bytes(graph_module: GraphModule, inputs: Sequence[object]) -> int:
    """Run a graph and measure the most bytes that its tensors hold at once, on all devices.

    Looks after every operator at which of the storages seen so far are still alive. What an
    operator allocates inside itself and frees again is not seen. Costs time in proportion to the
    number of live tensors; for small graphs.

    Args:
        graph_module: recompiled, so that its code is that of its graph.
        inputs: for the placeholders, held by the caller during the run.
    """
    held = [*inputs, *graph_module.parameters(), *graph_module.buffers()]
    return measure_peak_bytes_of(lambda: graph_module(*inputs), held=held)


def measure_peak_bytes_of(call: Callable[[], object], *, held: Sequence[object]) -> int:
    """The same of a function that runs graphs.

    Args:
        call: returns what it leaves.
        held: what the caller holds during the call.
    """
    watch = _StorageWatch()
    watch.see(held)
    with torch.no_grad(), watch:
        outputs = call()
        watch.see(outputs)
    return watch.peak_bytes


class _StorageWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    """Counts the bytes of live storages after every operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.peak_bytes = 0
        self._live_bytes = 0
        self._live: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.see(result)
        return result

    def see(self, value: object) -> None:
        """Note the storages of new tensors, and forget those that are gone."""
        self._forget()
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # torch's
                if reference not in self._live:
                    self._live[reference] = storage.nbytes()
                    self._live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)

    def _forget(self) -> None:
        gone = [
            reference
            for reference in self._live
            if reference.expired()  # type: ignore[no-untyped-call]  # torch's
        ]
        for reference in gone:
            self._live_bytes -= self._live.pop(reference)


_Piece = Callable[..., Sequence[torch.Tensor]]


class FakeRecording:
    """Replays by running the piece at its addresses, and leaves results at fixed addresses."""

    def __init__(
        self,
        piece: _Piece,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        on_replay: Callable[[], None],
    ) -> None:
        self._piece = piece
        self._on_replay = on_replay
        # As a kernel knows addresses: without keeping anybody's memory from being used again.
        self._inputs = [_unowned(value) for value in inputs]
        self.outputs = [_unowned(value) for value in outputs]

    def replay(self) -> None:
        """Run the piece on what its inputs hold now."""
        self._on_replay()
        for kept, result in zip(self.outputs, self._piece(*self._inputs), strict=True):
            kept.copy_(result)


class FakeRecorder:
    """Counts what it is asked for, and gives memory that was let go to later recordings."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replays = 0
        self.num_resets = 0
        self.memory_bytes = 0
        self._blocks: list[torch.Tensor] = []
        self._free: list[torch.Tensor] = []

    @property
    def bytes_of_results(self) -> int:
        """Memory that recordings have for results, whether in use or free."""
        return sum(block.numel() * block.element_size() for block in self._blocks)

    def warm_up(self, piece: _Piece, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run a piece as it is."""
        return piece(*inputs)

    def memory(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Bytes that make NaN of what is read before it is written."""
        self.memory_bytes += num_bytes
        return torch.full((num_bytes,), 0xFF, dtype=torch.uint8, device=device)

    def record(self, piece: _Piece, inputs: Sequence[torch.Tensor]) -> Recorded:
        """Record a piece at the addresses of its inputs."""
        self.num_recorded += 1
        # Recording computes nothing: this run is on copies, for the shapes of the results.
        copies = [_copied(value) for value in inputs]
        owned = [
            self._allocated(result) if view is None else view
            for result in piece(*copies)
            for view in [_same_view(result, copies, inputs)]
        ]
        return Recorded(
            recording=FakeRecording(piece, inputs, owned, self._replayed), outputs=owned
        )

    def reset(self) -> None:
        """Forget the memory of all recordings."""
        self.num_resets += 1
        self._blocks, self._free = [], []

    def _replayed(self) -> None:
        self.num_replays += 1

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


def _copied(value: torch.Tensor) -> torch.Tensor:
    """The same view of a copy of all the memory that it is a view of."""
    # torch leaves it untyped
    storage = value.untyped_storage().clone()  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=value.dtype).set_(
        storage, value.storage_offset(), value.size(), value.stride()
    )


def _same_view(
    result: torch.Tensor, copies: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> torch.Tensor | None:
    """Of an input's memory, what ``result`` is of its copy; None if it is of none."""
    for copied, given in zip(copies, inputs, strict=True):
        if result.untyped_storage().data_ptr() == copied.untyped_storage().data_ptr() != 0:
            view = torch.empty(0, dtype=result.dtype).set_(
                given.untyped_storage(), result.storage_offset(), result.size(), result.stride()
            )
            vars(view)["_memory_of"] = given  # memory is free when nobody holds any view of it
            return view
    return None


def _unowned(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor over the same memory."""
    return torch.empty(0, dtype=tensor.dtype).set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def _is_alike(block: torch.Tensor, like: torch.Tensor) -> bool:
    return (block.shape, block.stride(), block.dtype) == (like.shape, like.stride(), like.dtype)
