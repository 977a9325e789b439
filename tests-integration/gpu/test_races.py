"""Late producers and late copies change no number."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from gpu import delays, race_cases
from gpu.sites import Site

from gt_passes.analysis import host_copies


def test_a_round_trip_waits_for_what_it_copies_and_is_waited_for(site: Site) -> None:
    late = race_cases.late_round_trips(site)
    assert late.equal == [True] * 5
    assert (late.num_copies > 0) == (site.device.type == "cuda")


@pytest.mark.parametrize("recorded", [False, True])
def test_an_offloaded_step_waits_for_its_copies(site: Site, recorded: bool) -> None:
    late = race_cases.late_copies_of_a_step(site, recorded=recorded)
    assert late.equal == [True] * 4
    assert (late.num_copies > 0) == (site.device.type == "cuda")


def test_a_missing_wait_would_be_seen(gpu: Site) -> None:
    """That the tests above can fail: what is read before its late copy has come is not it."""
    x = torch.randn(1024, 1024, device=gpu.device)
    expected = x.cpu()
    with delays.slow_host_copies():
        host = torch.ops.gt_passes.offload(x)
        seen_at_once = host.clone()
        torch.ops.gt_passes.wait_copy(host, x)
    gpu.synchronize()
    assert torch.equal(host, expected)
    assert not torch.equal(seen_at_once, expected)


def test_late_copies_sleep_on_the_stream_of_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python of ``slow_host_copies``, with streams that write down what they are told."""
    told: list[str] = []
    compute, copies = (_stream(name, told) for name in ("compute", "copies"))
    current = [compute]
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: current[0])
    monkeypatch.setattr(
        torch.accelerator, "set_stream", lambda stream: current.__setitem__(0, stream)
    )
    monkeypatch.setattr(torch, "Stream", lambda device: copies)
    monkeypatch.setattr(delays, "sleep", lambda device: told.append(f"sleep on {current[0].name}"))
    monkeypatch.setattr(host_copies, "_streams", {})
    monkeypatch.setattr(
        host_copies, "_start_copy", lambda *_, device: told.append(f"copy from {current[0].name}")
    )
    with delays.slow_host_copies() as num_copies:
        value = torch.zeros(1)
        host_copies._start_copy(value, value, device=torch.device("cuda", 0))
    assert told == ["copies waits for compute", "sleep on copies", "copy from compute"]
    assert num_copies == [1]


def _stream(name: str, told: list[str]) -> SimpleNamespace:
    def wait_stream(other: SimpleNamespace) -> None:
        told.append(f"{name} waits for {other.name}")

    return SimpleNamespace(name=name, wait_stream=wait_stream)
