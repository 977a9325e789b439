"""Stages under data parallelism, run on a few ranks. Workers import this module by name."""

from __future__ import annotations

import torch
import torch.distributed as dist
from recording_transform import recording
from stage_models import ACTIVATION, Block, squared_error
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from gt_passes.testing import FakeRecorder
from gt_pipeline.errors import StageOrderError
from gt_pipeline.graph import GraphPipelineStage
from gt_pipeline.graph.executables import GraphTransform
from gt_pipeline.runner import GraphPPRunner, MicrobatchInputs
from gt_pipeline.schedules import schedule_of
from gt_trace.fsdp import gathered, shard


def _sharded(transform: GraphTransform | None = None) -> tuple[Block, GraphPipelineStage]:
    torch.manual_seed(0)
    # Of 15 rows, that two ranks share unevenly.
    module = Block(hidden=15)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    shard(module, mesh, mode="shard")
    stage = GraphPipelineStage(
        module, stage_index=1, num_stages=3, activations=[ACTIVATION], transform=transform
    )
    torch.manual_seed(dist.get_rank())
    return module, stage


def train_like_eager() -> tuple[list[str], int]:
    """Two microbatches, and eager's gradients with the same point of reduction.

    Returns:
        What differs in any bit, and how many gradients are DTensors as their parameters are.
    """
    return _compare_with_eager(*_sharded())


def train_recorded_like_eager() -> tuple[list[str], int]:
    """The same of a step whose actions are replayed, after two others."""
    recorder = FakeRecorder()
    module, stage = _sharded(recording(recorder))
    for _ in range(2):
        _compare_with_eager(module, stage)
        stage.discard()
        module.zero_grad()
    num_replays = recorder.num_replays
    found = _compare_with_eager(module, stage)
    assert recorder.num_replays == num_replays + 4
    return found


def replay_whole_steps() -> tuple[list[str], list[int]]:
    """Three steps of stages that two ranks share, replayed; beside one that runs as it is.

    Only one of the two stages may be gathered at a time, so that each is gathered more than once.

    Returns:
        What differs in any bit, and the launches of each step.
    """
    planned = schedule_of("Interleaved1F1B", num_ranks=1, num_stages=2, num_microbatches=3)
    recorder = FakeRecorder()
    runners, modules = [], []
    for transform in (recording(recorder), None):
        torch.manual_seed(0)
        module = nn.ModuleList([Block(hidden=15), Block(hidden=15)])
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
        inputs = MicrobatchInputs(args=(torch.randn(4, 8),), target=torch.randn(4, 8))
        stages: list[GraphPipelineStage] = []
        for index, block in enumerate(module):
            shard(block, mesh, mode="shard")
            stages.append(
                GraphPipelineStage(
                    block,
                    stage_index=index,
                    num_stages=2,
                    activations=stages[0].output_signature if stages else (),
                    inputs=inputs,
                    loss_fn=squared_error if stages else None,
                    transform=transform,
                    fake_mode=stages[0].fake_mode if stages else None,
                )
            )
        mine = dist.new_subgroups(1)[0]
        most = max(stage.unsharded_bytes for stage in stages)
        runners.append(GraphPPRunner(stages, planned, group=mine, max_unsharded_bytes=most))
        modules.append(module)
    torch.manual_seed(dist.get_rank())
    differing, launches = [], []
    for number in range(3):
        x = torch.randn(12, 8)
        before = recorder.num_replays
        losses = [runner.step(x, target=x + 1).losses for runner in runners]
        launches.append(recorder.num_replays - before)
        differing += [
            f"step {number}, loss" for a, b in zip(*losses, strict=True) if not torch.equal(a, b)
        ]
        named = [dict(module.named_parameters()) for module in modules]
        for name, found in named[0].items():
            assert isinstance(found.grad, DTensor)
            assert isinstance(named[1][name].grad, DTensor)
            if not torch.equal(found.grad.to_local(), named[1][name].grad.to_local()):
                differing.append(f"step {number}, {name}")
            for module in named:
                module[name].grad = None
    for runner in runners:
        runner.close()
    return differing, launches


def _compare_with_eager(module: Block, stage: GraphPipelineStage) -> tuple[list[str], int]:
    microbatches = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(2)]
    stage.unshard()
    outputs = [
        stage.forward(number, (x,), MicrobatchInputs())[0]
        for number, (x, _) in enumerate(microbatches)
    ]
    stage.reshard()
    stage.unshard()
    for number, (_, gradient) in enumerate(microbatches):
        stage.full_backward(number, (gradient,))
    stage.reduce_gradients()
    with gathered(module):
        expected = [module(x) for x, _ in microbatches]
    torch.autograd.backward(expected, [gradient for _, gradient in microbatches])
    differing = [
        f"output {number}"
        for number, (a, b) in enumerate(zip(outputs, expected, strict=True))
        if not torch.equal(a, b)
    ]
    num_placed = 0
    for name, parameter in module.named_parameters():
        found, wanted = stage.gradients()[name], parameter.grad
        assert isinstance(found, DTensor)
        assert isinstance(parameter, DTensor)
        assert isinstance(wanted, DTensor)
        num_placed += found.placements == parameter.placements
        if not torch.equal(found.to_local(), wanted.to_local()):
            differing.append(name)
    return differing, num_placed


def evaluate_without_gathering_again() -> tuple[bool, str]:
    """Whether evaluation computes what the module does, and what it says without parameters."""
    module, stage = _sharded()
    x = torch.randn(4, 8)
    module.eval()
    stage.unshard()
    (found,) = stage.evaluate(0, (x,), MicrobatchInputs())
    stage.discard()
    with torch.no_grad():
        same = torch.equal(found, module(x))
    try:
        stage.evaluate(0, (x,), MicrobatchInputs())
    except StageOrderError as error:
        return same, str(error)
    return same, "nothing was said"
