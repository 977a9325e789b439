"""On which streams copies to and from the host run, on a device that is played here.

A CUDA graph can record them for two reasons only: the stream of a copy forks from the one that is
recorded by an event, and joins it again by another.
"""

from __future__ import annotations

import pytest
import torch

from gt_passes.analysis import host_copies


class Played:
    """The log of a device, with one stream of its own beside the current one."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = Stream("main", self.log)


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self._log = log

    def wait_stream(self, other: Stream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")

    def record_event(self, event: Event) -> None:
        event.recorded_on = self.name
        self._log.append(f"{self.name} records an event")

    def wait_event(self, event: Event) -> None:
        self._log.append(f"{self.name} waits for the event on {event.recorded_on}")


class Event:
    recorded_on = "no stream"


class Memory:
    """As much of a tensor as the copies ask for."""

    def __init__(self, device: str, address: int, played: Played) -> None:
        self.device = torch.device(device)
        self._address = address
        self._played = played

    def data_ptr(self) -> int:
        return self._address

    def copy_(self, source: Memory, *, non_blocking: bool) -> None:
        assert non_blocking
        self._played.log.append(
            f"{self._played.current.name} copies {source.device.type} to {self.device.type}"
        )


@pytest.fixture
def played(monkeypatch):
    played = Played()
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: played.current)
    monkeypatch.setattr(
        torch.accelerator, "set_stream", lambda stream: setattr(played, "current", stream)
    )
    monkeypatch.setattr(torch, "Stream", lambda *, device: Stream("copies", played.log))
    monkeypatch.setattr(torch, "Event", lambda *, device: Event())
    monkeypatch.setattr(host_copies, "_streams", {})
    return played


def test_a_copy_to_a_room_forks_from_the_current_stream_and_its_wait_joins_it(played):
    value, room = Memory("cuda", 1, played), Memory("cpu", 2, played)
    assert host_copies.offload_into(value, room) is room
    assert played.current.name == "main"
    assert host_copies._wait_copy(room, value) is room
    assert played.log == [
        "copies waits for main",
        "copies copies cuda to cpu",
        "copies records an event",
        "main waits for the event on copies",
    ]


def test_a_copy_back_forks_and_joins_likewise(played, monkeypatch):
    host, value = Memory("cpu", 2, played), Memory("cuda", 3, played)
    monkeypatch.setattr(host_copies, "_room_for", lambda like, device: value)
    assert host_copies._reload(host, torch.device("cuda")) is value
    assert host_copies._wait_copy(value, host) is value
    assert played.log == [
        "copies waits for main",
        "copies copies cpu to cuda",
        "copies records an event",
        "main waits for the event on copies",
    ]


def test_copies_under_way_together_are_joined_each_by_its_own_wait(played):
    value = Memory("cuda", 1, played)
    rooms = [Memory("cpu", address, played) for address in (2, 3)]
    for room in rooms:
        host_copies.offload_into(value, room)
    for room in rooms:
        host_copies._wait_copy(room, value)
    assert played.log.count("main waits for the event on copies") == 2
    assert played.log[-1] == "main waits for the event on copies"
    assert not host_copies._pending
