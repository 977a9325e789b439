"""Recording and replaying: communicators, random numbers, a parameter that moved, releasing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from gpu.delays import delayed
from gpu.models import batches, captured_step, decoder, recipe, same_model
from gpu.sites import Site
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from gt_passes import PassContext, PassManager, release_cuda_graphs

_functional = torch.ops._c10d_functional


def recorded_graph(
    site: Site, function: Callable[..., Any], *inputs: torch.Tensor, static: int = 0
) -> tuple[GraphModule, dict[str, int]]:
    """The graph of a function with its pieces recorded, and what the pass counted.

    Args:
        site: where it runs.
        function: of tensors.
        inputs: examples.
        static: how many leading inputs keep their addresses.
    """
    graph_module = make_fx(function, tracing_mode="fake")(*inputs)
    names = tuple(f"static_{number}" for number in range(static))
    context = PassContext.from_graph(graph_module, static_input_names=names)
    (record,) = PassManager([site.cuda_graphs()], context=context).run(graph_module).records
    return graph_module, dict(record.report.counts)


def step_of_two_communicators(groups: list[str]) -> Callable[..., list[torch.Tensor]]:
    """Launches and waits of two communicators, crossed, with producers that are late.

    ::

        compute   late p   late q        p·x        q·y    r
        group 0          gather p ─────────┘
        group 1                  gather q ───────────┘ reduce r
    """
    first, second = groups

    def step(p: torch.Tensor, q: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        gathering_p = _functional.all_gather_into_tensor(delayed(p.sin()), 1, first)
        gathering_q = _functional.all_gather_into_tensor(delayed(q.cos()), 1, second)
        y = x.exp().tanh()
        product = _functional.wait_tensor(gathering_p) @ x
        result = _functional.wait_tensor(gathering_q) @ y + product
        reducing = _functional.reduce_scatter_tensor(delayed(result), "sum", 1, second)
        other = result.relu().square()
        return [_functional.wait_tensor(reducing) + 1, other.sum()]

    return step


def two_communicators(site: Site) -> tuple[dict[str, int], list[bool]]:
    """What was recorded, and of each step whether it is what eager computes to the bit.

    Released before the groups are destroyed, as a recording keeps its communicator.
    """
    width = 1024 if site.large else 8
    with site.one_rank_groups(2) as groups:
        p, q, x = torch.randn(3, width, width, device=site.device).unbind()
        step = step_of_two_communicators(groups)
        graph_module, counts = recorded_graph(site, step, p, q, x, static=2)
        equal = []
        for number in range(5):
            moving = x + number
            got, expected = graph_module(p, q, moving), step(p, q, moving)
            equal.append(all(map(torch.equal, got, expected)))
        site.synchronize()
        release_cuda_graphs(graph_module)
        del graph_module
    return counts, equal


def random_numbers_over_replays(site: Site) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Losses of steps with dropout, captured and replayed, from one seed each."""
    losses = []
    for recorded in (False, True):
        model = decoder(site, dropout=0.3)
        captured = captured_step(site, model, passes=recipe(site, recorded=recorded))
        assert not recorded or captured.counts("cuda-graphs").get("pieces", 0) == 1
        step = captured.bound()
        torch.manual_seed(5)
        losses.append([step(*batch)[0].clone() for batch in batches(site, 6)])
        release_cuda_graphs(captured.step.graph_module)
    step_losses, replayed_losses = losses
    return step_losses, replayed_losses


def a_parameter_that_moved(site: Site) -> tuple[list[bool], int]:
    """Of each step whether it is that of the captured graph, and how many pieces were recorded."""
    made: list[Any] = []

    def counting_recorder() -> Any:
        made.append(_Counting(site.new_recorder()))
        return made[-1]

    model = decoder(site)
    reference = same_model(model)
    counting = replace(site, new_recorder=counting_recorder)
    replayed = captured_step(counting, model, passes=recipe(counting, recorded=True)).bound()
    captured = captured_step(site, reference, passes=recipe(site)).bound()
    equal = []
    for number, batch in enumerate(batches(site, 7)):
        if number == 4:  # as a checkpoint that replaces a parameter
            for each in (model, reference):
                weight = each.output.weight
                each.output.weight = torch.nn.Parameter(weight.detach().clone() * 2)
        (loss, gradients), (expected, theirs) = replayed(*batch), captured(*batch)
        equal.append(torch.equal(loss, expected) and all(map(torch.equal, gradients, theirs)))
    return equal, made[0].num_recorded


class _Counting:
    """A recorder that counts recordings."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self.num_recorded = 0

    def record(self, *args: Any) -> Any:
        self.num_recorded += 1
        return self._recorder.record(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recorder, name)


def released_and_recorded_anew(site: Site) -> tuple[list[bool], bool]:
    """Steps before and after recordings were released, and whether groups can be made again.

    The order of a run that ends: recordings, then process groups. Destroying a group that a
    recording still uses hangs, or ends in an error of NCCL.
    """
    equal = []
    for _ in range(2):
        with site.one_rank_groups() as (group,):
            w, x = torch.randn(2, 64, 64, device=site.device).unbind()
            step = _step_of_one_communicator(group)
            graph_module, counts = recorded_graph(site, step, w, x, static=1)
            assert counts["pieces"] == 1
            for number in range(8):
                if number == 4:
                    release_cuda_graphs(graph_module)
                equal.append(torch.equal(graph_module(w, x + number)[0], step(w, x + number)[0]))
            site.synchronize()
            release_cuda_graphs(graph_module)
    return equal, dist.is_initialized()


def _step_of_one_communicator(group: str) -> Callable[..., list[torch.Tensor]]:
    def step(w: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        gathering = _functional.all_gather_into_tensor(delayed(w), 1, group)
        return [(_functional.wait_tensor(gathering) @ x).relu().sin().cos()]

    return step


def results_that_are_kept(site: Site) -> list[bool]:
    """Whether what earlier steps returned is still that when later steps have been replayed."""
    x = torch.randn(256, 256, device=site.device)

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        y = delayed(x).sin().cos()
        return [y.exp(), y.sum()]

    graph_module, _ = recorded_graph(site, step, x)
    kept = [graph_module(x + number) for number in range(6)]
    return [all(map(torch.equal, results, step(x + number))) for number, results in enumerate(kept)]
