"""A pipeline of two stages on one rank, run by a schedule over captured graphs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gpu.sites import Site
from torch import nn
from torch.fx import GraphModule

from gt_config.node_keys import PipelineAction
from gt_passes import PassContext, PassManager
from gt_pipeline.graph import GraphPipelineStage
from gt_pipeline.graph.executables import GraphTransform
from gt_pipeline.runner import GraphPPRunner, MicrobatchInputs
from gt_pipeline.schedules import schedule_of

_NUM_MICROBATCHES = 4


class _Stage(nn.Module):
    """Residual blocks; the first stage embeds tokens."""

    def __init__(self, width: int, *, embeds: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, width) if embeds else None
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


def _squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def _recording(site: Site) -> GraphTransform:
    def transform(graph_module: GraphModule, kind: PipelineAction, context: PassContext) -> None:
        passes = [site.cuda_graphs(min_kernels=1)]
        (record,) = PassManager(passes, context=context).run(graph_module).records
        assert record.report.refusals == ()

    return transform


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStep:
    losses_equal: list[bool]
    gradients_equal: dict[str, bool]
    """Beside eager autograd over the same microbatches in their order, by parameter."""


def two_stages_on_one_rank(
    site: Site, *, num_steps: int = 1, records: bool = False
) -> PipelineStep:
    """The last of ``num_steps`` equal steps; its actions are replayed if it ``records``."""
    width, rows = (1024, 256) if site.large else (16, 2)
    torch.manual_seed(3)
    modules = [_Stage(width, embeds=number == 0).to(site.device) for number in range(2)]
    tokens = torch.randint(64, (_NUM_MICROBATCHES * rows, 8), device=site.device)
    target = torch.randn(_NUM_MICROBATCHES * rows, 8, width, device=site.device)
    one = MicrobatchInputs(args=(tokens[:rows],), target=target[:rows])
    first = GraphPipelineStage(
        modules[0],
        stage_index=0,
        num_stages=2,
        inputs=one,
        device=site.device,
        transform=_recording(site) if records else None,
    )
    last = GraphPipelineStage(
        modules[1],
        stage_index=1,
        num_stages=2,
        activations=first.output_signature,
        inputs=one,
        loss_fn=_squared_error,
        device=site.device,
        transform=_recording(site) if records else None,
    )
    schedule = schedule_of(
        "Interleaved1F1B", num_ranks=1, num_microbatches=_NUM_MICROBATCHES, num_stages=2
    )
    with GraphPPRunner([first, last], schedule) as runner:
        for _ in range(num_steps):
            for module in modules:
                module.zero_grad(set_to_none=True)
            result = runner.step(tokens, target=target)
    site.synchronize()
    ours = [{name: p.grad for name, p in module.named_parameters()} for module in modules]
    for module in modules:
        module.zero_grad(set_to_none=True)
    expected = []
    for part, wanted in zip(tokens.split(rows), target.split(rows), strict=True):
        loss = _squared_error(modules[1](modules[0](part)), wanted)
        (loss / _NUM_MICROBATCHES).backward()
        expected.append(loss.detach())
    return PipelineStep(
        losses_equal=list(map(torch.equal, result.losses, expected)),
        gradients_equal={
            f"stage {number} {name}": torch.equal(ours[number][name], parameter.grad)
            for number, module in enumerate(modules)
            for name, parameter in module.named_parameters()
        },
    )
