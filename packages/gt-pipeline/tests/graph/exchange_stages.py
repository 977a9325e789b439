"""Stages whose layers exchange rows between ranks, and runs of them. Workers import this module."""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
import torch.distributed as dist
from stage_models import ACTIVATION, WIDTH
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from gt_config.node_keys import OverlappedBackward
from gt_pipeline.graph import (
    STAGE_FORM,
    GraphPipelineStage,
    StageGraphs,
    capture_stage,
    cut_stage,
)
from gt_pipeline.graph.overlapped_actions import OverlappedActions, overlap_actions
from gt_pipeline.runner import MicrobatchInputs
from gt_trace.artifacts.mesh_axes import MeshAxes
from gt_trace.fsdp import shard


class Exchange(torch.autograd.Function):
    """Rows to other ranks, and gradients back; sizes are data, as in expert parallelism."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, to: list[int], since: list[int], group: str) -> Tensor:
        ctx.sizes, ctx.group = (to, since), group
        return _all_to_all(x, received=since, sent=to, group=group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        to, since = ctx.sizes
        return _all_to_all(gradient, received=to, sent=since, group=ctx.group), None, None, None


def _all_to_all(x: Tensor, *, received: list[int], sent: list[int], group: str) -> Tensor:
    functional = torch.ops._c10d_functional
    launched = functional.all_to_all_single(x.contiguous(), received, sent, group)
    return functional.wait_tensor(launched)


class ExchangeLayer(nn.Module):
    """Sends rows away, computes on those that arrive, and gets its own back."""

    def __init__(self, *, by_data: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.expert = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))
        self.by_data = by_data

    def forward(self, x: Tensor) -> Tensor:
        group = dist.group.WORLD.group_name
        num_ranks = dist.get_world_size()
        gated = torch.tanh(self.gate(x))
        to = since = [x.shape[0] // num_ranks] * num_ranks
        if self.by_data:
            to, since = _sizes(gated, num_ranks, group)
        there = self.expert(Exchange.apply(gated, to, since, group))
        return x + Exchange.apply(there, since, to, group) * gated


def _sizes(gated: Tensor, num_ranks: int, group: str) -> tuple[list[int], list[int]]:
    """How many rows go to each rank: by the data, to the first rank those of a positive sum."""
    with torch.no_grad():
        first = (gated.sum(dim=1) > 0).sum().reshape(1)
        rest = torch.full_like(first, gated.shape[0]) - first
        counts = torch.cat([first, rest, *[torch.zeros_like(first)] * (num_ranks - 2)])
        ones = [1] * num_ranks
        arriving = _all_to_all(counts, received=ones, sent=ones, group=group)
        to, since = counts.tolist(), arriving.tolist()
        for size in (*to, *since):
            torch._check(size >= 0)
        return to, since


class ExchangeStage(nn.Module):
    """Layers that exchange, and in the end a product, or an exchange and nothing more."""

    def __init__(
        self, num_layers: int, *, by_data: bool = False, ends_in_exchange: bool = False
    ) -> None:
        super().__init__()
        self.ends_in_exchange = ends_in_exchange
        self.layers = nn.ModuleList(ExchangeLayer(by_data=by_data) for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        x = self.head(x)
        if not self.ends_in_exchange:
            return x
        sizes = [x.shape[0] // dist.get_world_size()] * dist.get_world_size()
        return Exchange.apply(x, sizes, sizes, dist.group.WORLD.group_name)


def stage_graphs(
    num_layers: int, *, by_data: bool = False, ends_in_exchange: bool = False, **options: Any
) -> StageGraphs:
    module = ExchangeStage(num_layers, by_data=by_data, ends_in_exchange=ends_in_exchange)
    options = {"stage_index": 1, "num_stages": 4, **options}
    return cut_stage(capture_stage(module, activations=[ACTIVATION], **options))


@functools.cache
def overlapped(
    forward_layers: int,
    backward_layers: int,
    kind: OverlappedBackward,
    *,
    by_data: bool = False,
    ends_in_exchange: bool = False,
) -> OverlappedActions:
    """A pair of two stages of one rank; for reading."""
    forward = stage_graphs(forward_layers, by_data=by_data)
    other = stage_graphs(
        backward_layers,
        by_data=by_data,
        ends_in_exchange=ends_in_exchange,
        stage_index=2,
        fake_mode=forward.capture.traced.fake_mode,
    )
    backward = other.full_backward if kind == "FULL_BACKWARD" else other.backward_input
    assert backward is not None
    return overlap_actions(forward.forward, backward)


def overlap_like_one_after_the_other(by_data: bool, same_stage: bool) -> list[bool]:
    """Overlapped pairs of live stages against the same actions run by themselves.

    Returns:
        For each result, and each gradient in the end, whether it is the same to the bit.
    """
    torch.manual_seed(dist.get_rank())
    first = ExchangeStage(2, by_data=by_data)
    second = first if same_stage else ExchangeStage(1, by_data=by_data)
    runs = []
    for overlaps in (False, True):
        stage = GraphPipelineStage(first, stage_index=1, num_stages=4, activations=[ACTIVATION])
        other = stage
        if not same_stage:
            other = GraphPipelineStage(
                second,
                stage_index=2,
                num_stages=4,
                activations=[ACTIVATION],
                fake_mode=stage.fake_mode,
            )
        runs.append(_run(stage, other, overlaps=overlaps))
    return [torch.equal(a, b) for a, b in zip(*runs, strict=True)]


def load_like_captured() -> tuple[bool, list[str]]:
    """A sharded stage that exchanges rows by data, captured, and loaded of rank 0's document.

    Returns:
        Whether this rank's document is that of rank 0, and the results that differ in any bit.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    axes = MeshAxes.of([mesh], groups={"world": dist.group.WORLD.group_name})
    module = ExchangeStage(2, by_data=True)
    for parameter in module.parameters():
        dist.broadcast(parameter.data, 0)
    shard(module, mesh, mode="shard")
    captured = GraphPipelineStage(module, stage_index=1, num_stages=4, activations=[ACTIVATION])
    encoded = STAGE_FORM.encode(captured.rewritten, axes)
    own = json.dumps(encoded.document)
    texts = [own]
    dist.broadcast_object_list(texts, 0)
    stage = GraphPipelineStage(
        module,
        stage_index=1,
        num_stages=4,
        activations=[ACTIVATION],
        rewritten=STAGE_FORM.decode(json.loads(texts[0]), axes, blob=encoded.blobs.__getitem__),
    )
    results = []
    for each in (captured, stage):
        each.unshard()
        results.append(_run(each, each, overlaps=True))
    pairs = enumerate(zip(*results, strict=True))
    return own == texts[0], [str(n) for n, (one, two) in pairs if not torch.equal(one, two)]


def _run(stage: GraphPipelineStage, other: GraphPipelineStage, *, overlaps: bool) -> list[Tensor]:
    torch.manual_seed(dist.get_rank() + 10)
    nothing = MicrobatchInputs()
    results: list[Tensor] = []
    for number, kind in enumerate(("FULL_BACKWARD", "BACKWARD_INPUT")):
        activation = torch.randn(ACTIVATION.shape)
        gradient = torch.randn(ACTIVATION.shape)
        other.forward(10 + number, (torch.randn(ACTIVATION.shape),), nothing)
        if overlaps:
            outputs, gradients = stage.overlap(
                number,
                (activation,),
                nothing,
                backward_stage=other,
                backward_kind=kind,
                backward_microbatch=10 + number,
                output_gradients=(gradient,),
            )
        else:
            gradients = getattr(other, kind.lower())(10 + number, (gradient,))
            outputs = stage.forward(number, (activation,), nothing)
        results += [*outputs, *gradients]
    other.backward_weight(11)
    for number in range(2):
        results += stage.full_backward(number, (torch.randn(ACTIVATION.shape),))
    for each in (stage, other):
        each.reduce_gradients()
        results += [gradient for _, gradient in sorted(each.gradients().items())]
    return results
