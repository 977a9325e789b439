"""The recorder that records: ``torch.cuda.CUDAGraph`` behind the protocol of ``cuda_graph_replay``.

Deliberately small, since it is the one part of ``cuda-graphs`` that needs a GPU to run.

``make test-gpu`` records with it: an H200 with torch 2.11 has (docs/decisions/0069).

Results are handed out once as the tensors that own their memory, and ever after as tensors over the
same addresses that own nothing, as ``torch/_inductor/cudagraph_trees.py`` does. The allocator gives
memory that was let go between two recordings of one pool to the later of them.

Source: PyTorch, ``torch/cuda/graphs.py`` (``make_graphed_callables``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gt_passes._torch_compilation_internals import symmetric_memory_workspaces
from gt_passes.cuda_graphs.cuda_graph_replay import Recorded


class CudaRecorder:
    """Records on a stream of its own, into a memory pool that all pieces share.

    Needs CUDA from the first call on, not for its construction.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None

    def warm_up(
        self, piece: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Run a piece as it is, on the caller's stream."""
        return piece(*inputs)

    def memory(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Bytes outside the pool, which no recording can use for its intermediates."""
        return torch.empty(
            num_bytes, dtype=torch.uint8, device=device, pin_memory=device.type == "cpu"
        )

    def record(
        self, piece: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]
    ) -> Recorded:
        """Record a piece at the addresses of ``inputs``."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it so
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's watchdog asks for the state of events from a thread of its own.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            outputs = tuple(piece(*inputs))
        recording = _CudaRecording(
            graph, _without_ownership(outputs), symmetric_memory_workspaces()
        )
        return Recorded(recording=recording, outputs=outputs)

    def reset(self) -> None:
        """Use a new memory pool; the old one goes with the last recording in it."""
        self._stream = None
        self._pool = None


@dataclass(frozen=True, slots=True)
class _CudaRecording:
    graph: torch.cuda.CUDAGraph
    outputs: Sequence[torch.Tensor]
    workspaces: Sequence[torch.Tensor]
    """A larger one may replace them for another graph, and this one goes on using them."""

    def replay(self) -> None:
        """Launch the recorded kernels on the current stream."""
        self.graph.replay()


class _DeviceBytes:
    """Memory of somebody else, offered to torch by the CUDA array interface."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.__cuda_array_interface__ = {
            "shape": (storage.nbytes(),),
            "typestr": "|u1",
            "data": (storage.data_ptr(), False),
            "version": 3,
        }


def _without_ownership(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The same tensors, without keeping their memory; what shares a storage goes on sharing it."""
    of_storage: dict[int, torch.Tensor] = {}
    results = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device.type != "cuda" or storage.nbytes() == 0:
            results.append(tensor)  # a room in host memory, which stays, or nothing at all
            continue
        address = storage.data_ptr()
        if address not in of_storage:
            of_storage[address] = torch.as_tensor(_DeviceBytes(storage), device=tensor.device)
        num_bytes = storage.nbytes() // tensor.dtype.itemsize * tensor.dtype.itemsize
        elements = of_storage[address][:num_bytes].view(tensor.dtype)
        results.append(elements.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()))
    return tuple(results)
