"""The native recipe does to a placed model what it does to one that was sharded by hand.

Both are the same decoder with FSDP on one rank of a fake world: one by ``gt_trace.fsdp``, one
by a plan whose parameters are constrained to be sharded so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch
from planned_models import NormedBlock
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from gt_autoparallel.apply.apply_plan import apply_plan
from gt_autoparallel.find import PlacementRequest, find_placement
from gt_autoparallel.problem.constraints import Constraints
from gt_config import CompileConfig, MemoryPolicy
from gt_passes import PassContext, default_recipe, estimate_peak_bytes
from gt_trace import trace_step
from gt_trace.fsdp import shard
from gt_trace.testing import fake_world

VOCABULARY, WIDTH, LENGTH, NUM_RANKS = 32, 16, 8, 4


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([NormedBlock(WIDTH) for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with fake_world(rank=1, world_size=NUM_RANKS):
        yield init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("fsdp",))


@pytest.fixture(scope="module")
def by_hand(mesh: DeviceMesh) -> nn.Module:
    model = Decoder()
    shard(model, mesh, mode="shard", reduction="sum")
    return model


@pytest.fixture(scope="module")
def placed(mesh: DeviceMesh) -> nn.Module:
    model = Decoder()
    everywhere = {"*": [Shard(0)]}
    plan = find_placement(
        model,
        mesh,
        (torch.zeros(2 * NUM_RANKS, LENGTH, dtype=torch.int64),),
        PlacementRequest(
            constraints=Constraints(inputs=everywhere, outputs=everywhere, parameters=everywhere)
        ),
    )
    return apply_plan(model, plan, mesh)


def done(model: nn.Module, policy: MemoryPolicy) -> tuple[dict[str, Mapping[str, int]], int]:
    """What each pass of the recipe counted in a traced step, and the peak of memory after it."""

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = model(tokens).flatten(0, 1)
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum")
        return loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))

    batch = torch.zeros(2, LENGTH, dtype=torch.int64)
    traced = trace_step(step, module=model)(batch, batch)
    static = traced.inputs[: traced.num_static_inputs]
    context = PassContext(
        fake_mode=traced.fake_mode, static_input_names=tuple(each.name for each in static)
    )
    options = CompileConfig(memory_policy=policy)
    report = default_recipe(options, context=context).run(traced.graph_module)
    assert report.verified
    return (
        {record.name: record.report.counts for record in report.records},
        estimate_peak_bytes(traced.graph_module),
    )


@pytest.mark.parametrize("policy", ["save_all", "selective", "full_recompute", "offload"])
def test_memory_policies_and_fsdp_passes_do_the_same_as_to_a_model_sharded_by_hand(
    policy: MemoryPolicy, by_hand: nn.Module, placed: nn.Module
) -> None:
    (expected, expected_peak), (found, peak) = done(by_hand, policy), done(placed, policy)
    # Views stand elsewhere, and so does what is tagged of them.
    compared = expected.keys() - {"canonicalize-views", "tag-saved-tensors", "delay-waits"}
    assert {name: found[name] for name in compared} == {n: expected[n] for n in compared}
    assert found["bucket-reduce-scatters"] == {"buckets": 3, "reductions_bucketed": 9}
    assert found["prefetch-all-gathers"]["prefetched"] > 3
    again = 0 if policy == "save_all" else 9
    assert found.get("reshard-after-forward", {}).get("gathered_again", 0) == again
    assert peak == expected_peak
