"""The recorder that records: ``torch.cuda.CUDAGraph`` behind the protocol of ``cuda_graph_replay``.

Deliberately small, since it is the one part of ``cuda-graphs`` that needs a GPU to run.

TODO: it has been written against PyTorch's documentation and has not run on a GPU yet; take this
note away when ``tests/cuda_graphs/test_cuda_recorder.py`` has passed on one.

Source: PyTorch, ``torch/cuda/graphs.py`` (``make_graphed_callables``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


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

    def static_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy outside the pool, which no recording can use for its intermediates."""
        kept = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        return kept.copy_(tensor)

    def record(
        self, piece: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]
    ) -> _CudaRecording:
        """Record a piece at the addresses of ``inputs``."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it so
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's watchdog asks for the state of events from a thread of its own.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            outputs = piece(*inputs)
        return _CudaRecording(graph, tuple(outputs))

    def reset(self) -> None:
        """Use a new memory pool; the old one goes with the last recording in it."""
        self._stream = None
        self._pool = None


@dataclass(frozen=True, slots=True)
class _CudaRecording:
    graph: torch.cuda.CUDAGraph
    outputs: Sequence[torch.Tensor]

    def replay(self) -> None:
        """Launch the recorded kernels on the current stream."""
        self.graph.replay()
