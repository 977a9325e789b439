"""What the workers of ``test_scheduled_models.py`` run: a model in chunks, before and after."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from ep_overlap import moe_steps
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from gt_config import CompileConfig, EpOverlapConfig
from gt_passes import (
    PassContext,
    PassManager,
    ScheduleEpOverlap,
    SeparateExchangeGroup,
    default_recipe,
)
from gt_passes.ep_overlap import (
    InputLayout,
    TokenDims,
    chunk_forwards,
    exposed_exchanges,
    interrupted_exchanges,
    settle_chunk_annotations,
)
from gt_trace import TracedStep
from gt_trace.fsdp import shard

_ACTIVATION = {"layers.*": "x", "layers.*.moe": "x_BLD"}


def outputs_before_and_after(
    strategy: Any, module_fqn: Any, memory_policy: Any, fsdp: bool
) -> dict[str, Any]:
    """Loss and gradients of this rank with chunks in turn and interleaved, and what was checked."""
    overlap = EpOverlapConfig(
        enabled=True, strategy=strategy, module_fqn=module_fqn, chunk_dim="batch"
    )
    model = moe_steps.make_model(moe_steps.StepCase())
    if fsdp:
        for layer in model.layers:
            # As expert parallelism has it: the experts of a rank are its own.
            mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
            shard(layer.attention, mesh, mode="shard")
            shard(layer.moe.shared, mesh, mode="shard")
    inputs = moe_steps.make_inputs(moe_steps.StepCase())
    step = _capture(model, inputs, overlap)
    names = tuple(entry.name for entry in step.inputs[: step.num_static_inputs])
    context = PassContext(fake_mode=step.fake_mode, static_input_names=names)
    options = CompileConfig(
        memory_policy=memory_policy,
        ep_overlap=overlap,
        disable_passes=("schedule-ep-overlap", "separate-exchange-group"),
    )
    default_recipe(options, context=context).run(step.graph_module)
    before = step.bind(model, executable=copy.deepcopy(step.graph_module))(*inputs)
    num_exposed = len(exposed_exchanges(step.graph_module))
    passes = (ScheduleEpOverlap(), SeparateExchangeGroup())
    report = PassManager(passes, context=context).run(step.graph_module)
    after = step.bind(model)(*inputs)
    again = PassManager([ScheduleEpOverlap()], context=context).run(step.graph_module)
    return {
        "before": _flat(before),
        "after": _flat(after),
        "exposed before": num_exposed,
        "exposed": [str(each) for each in exposed_exchanges(step.graph_module)],
        "interrupted": interrupted_exchanges(step.graph_module),
        "counts": [dict(record.report.counts) for record in report.records],
        "changed again": again.records[0].report.changed,
    }


def _capture(
    model: moe_steps.SmallModel, inputs: tuple[torch.Tensor, ...], overlap: EpOverlapConfig
) -> TracedStep:
    if overlap.strategy == "graph":
        return moe_steps.capture(model, inputs)
    name = _ACTIVATION[overlap.module_fqn]
    layout = InputLayout(activation=name, arguments={name: TokenDims(batch=0, seq=1)})
    with chunk_forwards(model, modules=overlap.module_fqn, chunk_dim="batch", layout=layout):
        step = moe_steps.capture(model, inputs)
    settle_chunk_annotations(step.graph_module)
    return step


def _flat(outputs: Any) -> list[torch.Tensor]:
    return [(each.to_local() if isinstance(each, DTensor) else each).detach() for each in outputs]
