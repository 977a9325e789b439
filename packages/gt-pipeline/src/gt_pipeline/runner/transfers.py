"""Activations and gradients from rank to rank, in process groups of their own.

There is one group for each direction (towards higher ranks, towards lower ones). NCCL runs the
transfers of a pair of ranks one after the other, in order of launch, and knows no tags: in one
group, two ranks that both send before they receive would wait for each other. In two groups, one
side of a pair only sends and the other only receives, in the same order (which the lowering of a
schedule guarantees). That ranks cannot wait in a circle is checked for every list that runs
(``posted_order``). Gloo matches transfers by tag, so there a wrong order cannot mix up tensors.

Buffers are made when a receive is posted, which is ahead of its use, from shapes that are known
before: no sizes are exchanged. They are not reused. A stage may keep what it was given, and pass
parts of it on to another stage of its rank, longer than the runner can know; the allocator sees
when memory is free again, and costs about as much as a pool would.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist

from gt_pipeline._torch_internals import TransferBackend, backend_of
from gt_pipeline.runner.process_groups import close_group, make_group, release_group
from gt_pipeline.runner.stage_protocol import ActivationSignature, Tensors

_Peer: TypeAlias = Literal["higher", "lower"]

_PEERS: tuple[_Peer, ...] = ("higher", "lower")

MAX_TENSORS = 64
"""The most tensors that go from one stage to the next; each takes a tag, and tags are 31 bits."""


@dataclass(frozen=True, slots=True)
class TransferChannel:
    """One way between this rank and another, for the tensors of one signature."""

    backend: TransferBackend
    """Of the direction's group."""

    peer: int
    """Rank in the group to send to or to receive from."""

    templates: tuple[torch.Tensor, ...]
    """Of the tensors that travel together, each of which takes one tag: one element, expanded."""

    def send(self, tensors: Tensors, tag: int) -> list[dist.Work]:
        """Start to send contiguous tensors; they must live until every work is waited for."""
        # Methods of the backend: torch.distributed.isend looks up and checks ranks on each call,
        # and those of the group go through the dispatcher.
        send, peer = self.backend.send, self.peer
        return [send([tensor], peer, tag + index) for index, tensor in enumerate(tensors)]

    def receive(self, tag: int) -> tuple[Tensors, list[dist.Work]]:
        """Start to receive into new buffers, which hold the values after every work's wait."""
        receive, peer = self.backend.recv, self.peer
        # Contiguous. It takes a third of what torch.empty takes to read its arguments.
        buffers = tuple([torch.empty_like(each) for each in self.templates])
        return buffers, [
            receive([buffer], peer, tag + index) for index, buffer in enumerate(buffers)
        ]


class Transfers:
    """The process groups of one pipeline's transfers, towards its higher and its lower ranks.

    Made by `make_transfers` of the pipeline's global ranks, in order.
    """

    def __init__(self, pipeline: Sequence[int], groups: Mapping[_Peer, dist.ProcessGroup]) -> None:
        self.rank = list(pipeline).index(dist.get_rank())
        self._groups = dict(groups)
        # PyTorch sorts the ranks of a group.
        self._rank_in_group = [sorted(pipeline).index(rank) for rank in pipeline]
        self._lock = threading.Lock()
        self._closed = False

    def channel(
        self,
        peer: int,
        signatures: Sequence[ActivationSignature],
        device: torch.device,
        *,
        sends: bool,
    ) -> TransferChannel:
        """The way by which this rank sends to another of the pipeline, or receives from it."""
        towards_higher = (peer > self.rank) == sends
        group = self._groups["higher" if towards_higher else "lower"]
        templates = tuple(
            torch.empty((), dtype=each.dtype, device=device).expand(each.shape)
            for each in signatures
        )
        return TransferChannel(backend_of(group, device), self._rank_in_group[peer], templates)

    def close(self, device: torch.device) -> None:
        """End every transfer, here and, with gloo, on the ranks at the other ends.

        May be called from another thread than the one that waits, and more than once.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for group in self._groups.values():
                close_group(group, device)

    def release(self) -> None:
        """Give the groups back to torch.distributed; nothing may be under way."""
        for group in self._groups.values():
            release_group(group)
        self._groups = {}


def make_transfers(
    pipelines: Iterable[Sequence[int]], *, timeout: timedelta | None = None
) -> Transfers | None:
    """The process groups of this rank's pipeline; None if that is a pipeline of one rank.

    Every rank of the world makes those of all ``pipelines`` (their global ranks, alike on all).
    """
    mine = None
    for pipeline in pipelines:
        if len(pipeline) == 1:
            continue
        groups = {}
        for direction in _PEERS:
            purpose = f"pipeline transfers towards {direction} ranks"
            if (group := make_group(pipeline, purpose=purpose, timeout=timeout)) is not None:
                groups[direction] = group
        if groups:
            mine = Transfers(pipeline, groups)
    return mine
