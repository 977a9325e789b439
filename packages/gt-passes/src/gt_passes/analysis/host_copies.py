"""Operators that copy a tensor to host memory and back while other work goes on.

::

    started = gt_passes.offload(value);         host = gt_passes.wait_copy(started, value)
    ...
    returning = gt_passes.reload(host, device);  value = gt_passes.wait_copy(returning, host)

A copy is started by one node and waited for by another, as functional collectives are. The second
argument of the wait is what is copied from: naming it there keeps its memory until the copy is
done, in whatever order nodes run, and lets it go afterwards.

On CUDA a copy runs on a stream of its own, between pinned and device memory, and the wait makes the
current stream wait for it. That much is written after PyTorch's own operators of the same purpose
(``torch/_functorch/_activation_offloading/offload_ops.py``), which cannot run on a CPU, and which
resize the storage of the source instead of letting go of it. On a CPU both copies are plain clones,
so that the same graph runs, and takes and gives the same bits.

Both can be recorded in a CUDA graph: the stream of the copy forks from the current one by an event,
and the wait joins it again. Only new host memory cannot, hence ``offload_into``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

_library = torch.library.Library("gt_passes", "DEF")  # type: ignore[no-untyped-call]  # torch's
for _schema in (
    "offload(Tensor value) -> Tensor",
    "reload(Tensor host, Device device) -> Tensor",
    "wait_copy(Tensor(a) copy, Tensor source) -> Tensor(a)",
):
    # The tag says that nothing is done besides computing the result: no barrier for other passes.
    _library.define(_schema, tags=(torch.Tag.pointwise,))  # type: ignore[no-untyped-call]  # torch's

OFFLOAD = torch.ops.gt_passes.offload.default
"""``offload(value)``: starts a copy to host memory, of the same shape and strides."""

RELOAD = torch.ops.gt_passes.reload.default
"""``reload(host, device)``: starts a copy back to the device."""

WAIT_COPY = torch.ops.gt_passes.wait_copy.default
"""``wait_copy(copy, source)``: the copy, done. ``source`` is what it was started on."""


def is_host_copy(node: Node) -> bool:
    """Whether a node has the value of its first argument, up to the device on which it lies."""
    return node.target in (OFFLOAD, RELOAD, WAIT_COPY)


def starts_host_copy(node: Node) -> bool:
    """Whether a node starts a copy, in either direction."""
    return node.target in (OFFLOAD, RELOAD)


def copy_source(start: Node) -> object:
    """The tensor that a copy reads until it was waited for.

    Args:
        start: a node for which ``starts_host_copy`` holds.
    """
    return start.args[0] if start.args else next(iter(start.kwargs.values()))


def waits_for_copy(start: Node) -> Iterator[Node]:
    """The waits for a copy.

    Args:
        start: a node for which ``starts_host_copy`` holds.
    """
    for user in start.users:
        if user.target is WAIT_COPY and waited_copy(user) is start:
            yield user


def waited_copy(wait: Node) -> object:
    """The copy that a ``WAIT_COPY`` node waits for."""
    return wait.args[0] if wait.args else wait.kwargs["copy"]


def is_copy_to_host(node: Node) -> bool:
    """Whether a node starts a copy to host memory."""
    return node.target is OFFLOAD


_streams: dict[torch.device, torch.Stream] = {}
_pending: dict[int, tuple[torch.Event, torch.device]] = {}  # by address of the copy


def offload_into(value: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """``OFFLOAD``, into memory that is there already.

    A CUDA graph copies to where the host memory was when it was recorded, so that memory must stay.

    Args:
        value: on any device.
        room: host memory, of equal shape, strides and dtype; pinned if ``value`` is on a GPU.

    Returns:
        ``room``, to be waited for by ``WAIT_COPY``.
    """
    if value.device.type == "cpu":
        return room.copy_(value)
    _start_copy(room, value, device=value.device)
    return room


@torch.library.impl(_library, "offload", "CompositeExplicitAutograd")
def _offload(value: torch.Tensor) -> torch.Tensor:
    on_gpu = value.device.type != "cpu"
    return offload_into(value, _room_for(value, torch.device("cpu"), pin_memory=on_gpu))


@torch.library.impl(_library, "reload", "CompositeExplicitAutograd")
def _reload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return _room_for(host, device).copy_(host)
    value = _room_for(host, device)
    _start_copy(value, host, device=value.device)
    return value


@torch.library.impl(_library, "wait_copy", "CompositeExplicitAutograd")
def _wait_copy(copy: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    pending = _pending.pop(copy.data_ptr(), None)
    if pending is not None:
        event, device = pending
        torch.accelerator.current_stream(device).wait_event(event)
    return copy


def _room_for(
    value: torch.Tensor, device: torch.device, *, pin_memory: bool = False
) -> torch.Tensor:
    """Memory for a copy, with the same strides if ``value`` has neither gaps nor overlaps."""
    room = torch.empty_like(value, device=device, pin_memory=pin_memory)
    if any(isinstance(size, torch.SymInt) for size in value.shape):
        return room
    # Where a size is 1, a stride means nothing, and empty_like makes one up.
    of_sizes = zip(value.shape, value.stride(), room.stride(), strict=True)
    if all(size == 1 or stride == made for size, stride, made in of_sizes):
        return room.as_strided(value.shape, value.stride())
    return room


def _start_copy(destination: torch.Tensor, source: torch.Tensor, *, device: torch.device) -> None:
    """Copy on the stream for copies, after all that the current stream has been given so far.

    The source was computed there, and the memory of the destination may still be read there by
    whoever had it before.
    """
    current = torch.accelerator.current_stream(device)
    stream = _streams.get(device)
    if stream is None:
        stream = _streams[device] = torch.Stream(device=device)
    stream.wait_stream(current)
    torch.accelerator.set_stream(stream)
    try:
        destination.copy_(source, non_blocking=True)
    finally:
        torch.accelerator.set_stream(current)
    event = torch.Event(device=device.type)
    stream.record_event(event)
    _pending[destination.data_ptr()] = (event, device)


for _name, _fake in (
    ("offload", lambda value: _room_for(value, torch.device("cpu"))),
    ("reload", _room_for),
    ("wait_copy", lambda copy, source: copy),
):
    torch.library.register_fake(f"gt_passes::{_name}", _fake, lib=_library)
