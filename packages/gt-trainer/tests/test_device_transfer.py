"""Numbers and batches between host and device, without waiting for the device."""

from types import SimpleNamespace

import pytest
import torch

from gt_trainer import device_transfer
from gt_trainer.device_transfer import HostCopy, copy_to_host, send_to_device

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Event:
    """A device's event; `error` is what asking for it raises."""

    def __init__(self, *, is_reached=False, error=None):
        self.is_reached = is_reached
        self.error = error

    def query(self):
        if self.error is not None:
            raise self.error
        return self.is_reached

    def synchronize(self):
        self.is_reached = True


def on_its_way(event):
    return HostCopy(names=("loss",), numbers=torch.tensor([2.5]).double(), copied=event)


def test_numbers_of_the_host_are_ready_and_exactly_what_item_gives():
    values = {
        "loss": torch.tensor(0.1),
        "tokens": torch.tensor([2**53 - 1]),
        "norm": torch.tensor(float("inf")),
    }
    copy = copy_to_host(values)
    assert copy.is_ready()
    assert copy.wait() == {name: value.item() for name, value in values.items()}


def test_numbers_are_those_of_the_time_of_the_copy():
    loss = torch.tensor(1.0)
    copy = copy_to_host({"loss": loss})
    loss.add_(1.0)
    assert copy.wait() == {"loss": 1.0}


def test_numbers_of_a_device_are_ready_when_its_event_is_reached():
    event = Event()
    copy = on_its_way(event)
    assert not copy.is_ready()
    event.is_reached = True
    assert copy.is_ready()


def test_reading_numbers_of_a_device_waits_for_its_event():
    event = Event()
    assert on_its_way(event).wait() == {"loss": 2.5}
    assert event.is_reached


def test_numbers_of_a_device_that_failed_never_arrive():
    assert not on_its_way(Event(error=torch.AcceleratorError("device-side assert"))).is_ready()


def test_copy_from_a_gpu_is_pinned_not_waited_for_and_followed_by_an_event(monkeypatch):
    calls = []
    monkeypatch.setattr(
        torch, "get_device_module", lambda device: SimpleNamespace(Event=lambda: Recorded(calls))
    )
    monkeypatch.setattr(torch, "empty_like", pinned(calls))
    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda *args, **kwargs: calls.append(("copy_", kwargs))
    )
    copy = copy_to_host({"loss": torch.empty((), device="meta")})  # stands for a GPU
    assert calls == [
        ("empty_like", {"device": "cpu", "pin_memory": True}),
        ("copy_", {"non_blocking": True}),
        ("record", {}),
    ]
    assert isinstance(copy.copied, Recorded)


class Recorded(Event):
    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def record(self):
        self.calls.append(("record", {}))


def pinned(calls):
    """`torch.empty_like` without the memory that only a machine with a GPU can pin."""
    make = torch.empty_like

    def empty_like(like, **options):
        calls.append(("empty_like", options))
        return make(like, device=options["device"])

    return empty_like


def test_batch_of_the_host_is_sent_to_a_gpu_from_pinned_memory(monkeypatch):
    sent = []
    batch = torch.zeros(2, 3)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: SimpleNamespace(
        to=lambda device, **options: sent.append((self, device, options))
    ))  # fmt: skip
    send_to_device(batch, CUDA)
    assert sent == [(batch, CUDA, {"non_blocking": True})]


def test_batch_stays_where_it_is_on_cpu():
    batch = torch.zeros(2, 3)
    assert send_to_device(batch, CPU) is batch


@pytest.mark.parametrize("requires_grad", [True, False])
def test_local_part_has_no_history(requires_grad):
    tensor = torch.zeros(2, requires_grad=requires_grad)
    assert not device_transfer.local_part(tensor).requires_grad
