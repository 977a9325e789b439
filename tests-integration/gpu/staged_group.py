"""A process group whose ranks share one GPU: tensors travel through the host, by gloo.

NCCL refuses two ranks on one device, and gloo gathers no tensors of a GPU. Copies wait for the GPU,
so that these collectives cannot be recorded, and say nothing of speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future

STAGED = "staged"


def register_staged_backend() -> None:
    """Let ``init_process_group(STAGED)`` make such groups, for tensors of CPUs and GPUs."""
    if STAGED not in dist.Backend.backend_list:
        dist.Backend.register_backend(STAGED, _new_group, devices=["cpu", "cuda"])


def _new_group(store: Any, rank: int, world_size: int, timeout: Any) -> dist.ProcessGroup:
    return StagedGroup(dist.ProcessGroupGloo(store, rank, world_size, timeout), rank, world_size)


class StagedGroup(dist.ProcessGroup):
    """Gloo's collectives on copies in the host's memory."""

    def __init__(self, gloo: Any, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self._gloo, self._world_size = gloo, world_size

    def getBackendName(self) -> str:  # noqa: N802  # PyTorch's name
        return STAGED

    @property
    def group_name(self) -> str:
        """PyTorch's own name is kept for groups with backends of C++ alone."""
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def pg_name(self) -> str:
        return self.group_name

    def barrier(self, opts: Any = None) -> Any:
        self._gloo.barrier().wait()
        return _done([])

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        return self._in_place(tensors, lambda staged: self._gloo.broadcast(staged, opts))

    def scatter(
        self, outputs: list[torch.Tensor], parts: list[list[torch.Tensor]], opts: Any
    ) -> Any:
        staged = [torch.empty(output.shape, dtype=output.dtype) for output in outputs]
        given = [[part.cpu().contiguous() for part in each] for each in parts]
        self._gloo.scatter(staged, given, opts).wait()
        return _brought(outputs, staged)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        return self._in_place(tensors, lambda staged: self._gloo.allreduce(staged, opts))

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        for tensor in tensors:
            self.allreduce([tensor], opts)
        return _done(tensors)

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        for output, given in zip(outputs, inputs, strict=True):
            self._allgather_base(output, given)
        return _done(outputs)

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        parts = [torch.empty(given.shape, dtype=given.dtype) for _ in range(self._world_size)]
        self._gloo.allgather([parts], [given.cpu().contiguous()]).wait()
        return _brought([output], [torch.stack(parts).reshape(output.shape)])

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> Any:
        for output, given in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, given, opts)
        return _done(outputs)

    def _reduce_scatter_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any) -> Any:
        whole = given.cpu().contiguous()
        options = dist.AllreduceOptions()
        average = opts.reduceOp == dist.ReduceOp.AVG
        options.reduceOp = dist.ReduceOp.SUM if average else opts.reduceOp
        self._gloo.allreduce([whole], options).wait()
        part = whole.chunk(self._world_size)[self.rank()].reshape(output.shape)
        return _brought([output], [part / self._world_size if average else part])

    def alltoall_base(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> Any:
        staged = torch.empty(output.shape, dtype=output.dtype)
        options = dist.AllToAllOptions()
        self._gloo.alltoall_base(
            staged, given.cpu().contiguous(), output_sizes, input_sizes, options
        ).wait()
        return _brought([output], [staged])

    def _in_place(self, tensors: list[torch.Tensor], run: Any) -> Any:
        staged = [tensor.cpu().contiguous() for tensor in tensors]
        run(staged).wait()
        return _brought(tensors, staged)


def _brought(outputs: Sequence[torch.Tensor], staged: Sequence[torch.Tensor]) -> Any:
    with torch.no_grad():
        for output, each in zip(outputs, staged, strict=True):
            output.copy_(each)
    return _done(list(outputs))


def _done(result: list[torch.Tensor]) -> Any:
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future)
