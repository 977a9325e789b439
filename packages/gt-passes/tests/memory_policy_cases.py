"""What the workers of ``test_memory_policy_sharded.py`` run: a sharded step under each policy."""

from __future__ import annotations

import copy
import dataclasses

import torch
import torch.distributed as dist
from memory_models import VOCAB, Block, Captured, Decoder
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.fx import GraphModule
from torch.nn import functional as F

from gt_config import MemoryPolicy
from gt_passes import (
    CanonicalizeViews,
    GraphPass,
    OffloadTagged,
    PassManager,
    RecomputeTagged,
    RemoveDeadCode,
    ShareAllGathers,
    TagSavedTensors,
)
from gt_passes.analysis.liveness import estimate_peak_bytes
from gt_trace.capture.trace import trace_step
from gt_trace.fsdp import shard
from gt_trace.graph_text import collective_counts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one policy did on one rank."""

    is_bitwise: bool
    """Whether loss and gradients are those of the graph without passes."""

    num_outputs: int
    peak_bytes: int
    collectives: dict[str, int]
    operators: tuple[str, ...]
    """In execution order. Names of nodes tell which part of a value a tensor-parallel rank takes."""


def capture_sharded() -> Captured:
    """FSDP times tensor parallelism, two ranks each.

    The output of the attention is gathered over the tensor-parallel ranks in the middle of a layer,
    so that computing the layer again has to gather it again.
    """
    torch.manual_seed(0)
    model = Decoder([Block(32) for _ in range(2)], dim=32)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    for layer in model.layers:
        plan = {
            "wo": ColwiseParallel(output_layouts=Replicate()),
            "w1": ColwiseParallel(),
            "w3": ColwiseParallel(),
            "w2": RowwiseParallel(),
        }
        parallelize_module(layer, mesh["tp"], plan)
    shard(model, mesh["dp"], mode="shard")

    def step(
        tokens: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        return loss, torch.autograd.grad(loss, tuple(model.parameters()))

    torch.manual_seed(dist.get_rank() // 2)
    args = (torch.randint(0, VOCAB, (2, 24)), torch.randint(0, VOCAB, (2, 24)))
    return Captured(step=trace_step(step, module=model)(*args), model=model, args=args)


def outcomes(policies: tuple[MemoryPolicy, ...]) -> dict[str, Outcome]:
    """The outcome of each policy, on copies of one captured step."""
    captured = capture_sharded()
    unpassed = captured.graph_module
    reference = captured.outputs(unpassed)
    return {
        policy: _outcome(captured, copy.deepcopy(unpassed), policy, reference)
        for policy in policies
    }


def _outcome(
    captured: Captured,
    graph_module: GraphModule,
    policy: MemoryPolicy,
    reference: list[torch.Tensor],
) -> Outcome:
    again = policy == "full_recompute"
    passes: list[GraphPass] = [
        RemoveDeadCode(),
        CanonicalizeViews(),
        ShareAllGathers(),
        TagSavedTensors(policy=policy, recompute_collectives=again, offload_min_bytes=1),
        RecomputeTagged(recompute_collectives=again),
        OffloadTagged(),
    ]
    PassManager(passes, context=captured.context, estimate_peak_bytes=estimate_peak_bytes).run(
        graph_module
    )
    results = captured.outputs(graph_module)
    return Outcome(
        is_bitwise=all(map(torch.equal, results, reference)),
        num_outputs=len(results),
        peak_bytes=estimate_peak_bytes(graph_module),
        collectives=collective_counts(graph_module),
        operators=tuple(
            str(node.target) for node in graph_module.graph.nodes if node.op == "call_function"
        ),
    )
