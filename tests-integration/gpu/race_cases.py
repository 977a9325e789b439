"""Copies to host memory and back, where whoever should be waited for is late.

A copy that does not wait for what it copies, memory that is used again before its copy is done, and
a reader that does not wait for the copy back: each gives other numbers here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gpu.delays import delayed, slow_host_copies
from gpu.models import batches, captured_step, decoder, eager_step, recipe
from gpu.replay_cases import recorded_graph
from gpu.sites import Site

from gt_passes import release_cuda_graphs
from gt_passes.analysis.host_copies import OFFLOAD, RELOAD, WAIT_COPY


@dataclass(frozen=True, slots=True, kw_only=True)
class LateCopies:
    equal: list[bool]
    """Of each step, whether it is what no copy at all gives."""

    num_copies: int
    """Started on a stream of their own; none on a CPU."""


def _round_trip(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    """To the host and back; between the two, other values take the memory that was let go.

    ::

        compute   late h ─┬─ y ── wait ── z (where h was) ── ...      ── wait ── uses it
        copies            └─ late copy ┘                  late copy ──┘
    """
    h = delayed(x @ w)
    started = OFFLOAD(h)
    y = (x + 1).sin()
    host = WAIT_COPY(started, h)
    z = torch.full_like(y, 7.0) * y
    z = z.cos() + torch.full_like(z, 3.0)
    returning = RELOAD(host, x.device)
    other = z.exp() @ w
    again = WAIT_COPY(returning, host)
    return [again * 2, other]


def _without_copies(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    y = (x + 1).sin()
    z = torch.full_like(y, 7.0) * y
    z = z.cos() + torch.full_like(z, 3.0)
    return [(x @ w) * 2, z.exp() @ w]


def late_round_trips(site: Site) -> LateCopies:
    """A tensor's way to the host and back, in a graph that is recorded as far as it can be."""
    width = 2048 if site.large else 16
    x, w = torch.randn(2, width, width, device=site.device).unbind()
    graph_module, _ = recorded_graph(site, _round_trip, x, w, static=0)
    equal = []
    with slow_host_copies() as num_copies:
        results = [graph_module(x + number, w) for number in range(5)]
    for number, got in enumerate(results):
        equal.append(all(map(torch.equal, got, _without_copies(x + number, w))))
    release_cuda_graphs(graph_module)
    return LateCopies(equal=equal, num_copies=num_copies[0])


def late_copies_of_a_step(site: Site, *, recorded: bool) -> LateCopies:
    """A training step under policy offload, every copy of which is late."""
    model = decoder(site)
    passes = recipe(site, memory_policy="offload", recorded=recorded)
    captured = captured_step(site, model, passes=passes)
    step, reference = captured.bound(), eager_step(model)
    equal = []
    with slow_host_copies() as num_copies:
        for batch in batches(site, 4):
            loss, gradients = step(*batch)
            expected, theirs = reference(*batch)
            equal.append(torch.equal(loss, expected) and all(map(torch.equal, gradients, theirs)))
    release_cuda_graphs(captured.step.graph_module)
    return LateCopies(equal=equal, num_copies=num_copies[0])
