"""Measuring devices for tests of passes, and for those who write passes of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from gt_passes._torch_internals import StorageWeakRef, TorchDispatchMode, pytree


def measure_peak_bytes(graph_module: GraphModule, inputs: Sequence[object]) -> int:
    """Run a graph and measure the most bytes that its tensors hold at once, on all devices.

    Looks after every operator at which of the storages seen so far are still alive. What an
    operator allocates inside itself and frees again is not seen. Costs time in proportion to the
    number of live tensors; for small graphs.

    Args:
        graph_module: recompiled, so that its code is that of its graph.
        inputs: for the placeholders, held by the caller during the run.
    """
    watch = _StorageWatch()
    watch.see(inputs)
    watch.see([*graph_module.parameters(), *graph_module.buffers()])
    with torch.no_grad(), watch:
        outputs = graph_module(*inputs)
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
