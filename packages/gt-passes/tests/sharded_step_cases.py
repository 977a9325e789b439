"""What the workers of ``test_sharded_step.py`` run: a sharded step, before and after the recipe."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from gt_config import CompileConfig
from gt_passes import PassContext, PassManagerReport, default_recipe
from gt_trace.capture.trace import trace_step
from gt_trace.capture.traced_step import TracedStep
from gt_trace.fsdp import MixedPrecision, shard


class TiedModel(nn.Module):
    """Embeds with the weight that it also predicts with."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.hidden = nn.Linear(8, 8)
        self.prediction = nn.Linear(8, 13, bias=False)
        self.prediction.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.prediction(self.hidden(self.embedding(tokens)).tanh())


def capture_two_microbatches(
    precision: MixedPrecision | None = None,
) -> tuple[TracedStep, nn.Module, torch.Tensor]:
    """A step that runs the forward twice, and so gathers every parameter twice."""
    torch.manual_seed(0)
    model = TiedModel()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    shard(model, mesh, mode="shard", mixed_precision=precision)

    def step(tokens: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        losses = [
            F.cross_entropy(model(part)[:, :-1].flatten(0, 1).float(), part[:, 1:].flatten())
            for part in tokens.chunk(2)
        ]
        loss = losses[0] + losses[1]
        return loss, torch.autograd.grad(loss, tuple(model.parameters()))

    tokens = (torch.arange(4 * 9) * (dist.get_rank() + 3) % 13).view(4, 9)
    return trace_step(step, module=model)(tokens), model, tokens


def run_recipe(step: TracedStep) -> PassManagerReport:
    """Run the default recipe on a captured step, in place, without what moves FSDP collectives."""
    names = tuple(entry.name for entry in step.inputs[: step.num_static_inputs])
    context = PassContext(fake_mode=step.fake_mode, static_input_names=names)
    options = CompileConfig(fsdp_bucketing="off", prefetch_layers=0)
    return default_recipe(options, context=context).run(step.graph_module)


def outputs_before_and_after() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Loss and gradient shards of this rank, without passes and with them."""
    step, model, tokens = capture_two_microbatches()
    unpassed = copy.deepcopy(step.graph_module)
    bound = step.bind(model, executable=unpassed)
    before = bound(tokens)
    report = run_recipe(step)
    (sharing,) = (each for each in report.records if each.name == "share-all-gathers")
    assert sharing.report.counts["all_gathers_shared"] > 0
    after = step.bind(model)(tokens)
    return flat(before), flat(after)


def outputs_before_and_after_buckets() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The same in bfloat16 and reduced in float32, with the recipe that packs both into buckets."""
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    step, model, tokens = capture_two_microbatches(precision)
    before = step.bind(model, executable=copy.deepcopy(step.graph_module))(tokens)
    names = tuple(entry.name for entry in step.inputs[: step.num_static_inputs])
    context = PassContext(fake_mode=step.fake_mode, static_input_names=names)
    report = default_recipe(CompileConfig(), context=context).run(step.graph_module)
    buckets = {each.name: each.report.counts.get("buckets") for each in report.records}
    assert buckets["bucket-all-gathers"]
    assert buckets["bucket-reduce-scatters"]
    return flat(before), flat(step.bind(model)(tokens))


def flat(outputs: tuple[torch.Tensor, tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    loss, gradients = outputs
    return [loss.detach(), *(gradient.to_local().detach() for gradient in gradients)]
