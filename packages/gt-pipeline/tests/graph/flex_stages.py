"""Stages that compile FlexAttention and take a mask with every batch, as torchtitan's models do.

FlexAttention refuses CPU tensors that require a gradient; nothing else keeps its dense
implementation from training there. Without that refusal eager execution and captured graphs run
the same code, and can be compared to the bit. Workers import this module by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.attention.flex_attention as flex
from stage_models import squared_error
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask

from gt_config.node_keys import PipelineAction
from gt_passes import CompileFlexAttention, DescribeOnly, PassContext, PassManager
from gt_pipeline.graph import GraphPipelineStage
from gt_pipeline.runner import GraphPPRunner, MicrobatchInputs
from gt_pipeline.runner.graph_pp_runner import StepResult
from gt_pipeline.runner.microbatches import MicrobatchDims, split_microbatches
from gt_pipeline.schedules import Schedule, schedule_of
from gt_trace import flex_attention_on_cpu
from gt_trace.fsdp import gathered, shard

WIDTH, LENGTH, BLOCK = 16, 64, 32
NUM_MICROBATCHES, MICROBATCH_SIZE = 4, 2

_attend: Callable[..., Any] = torch.compile(flex.flex_attention)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Eager execution of the models below: Inductor's kernels for a CPU have no backward."""
    global _attend
    compiled, _attend = _attend, flex.flex_attention
    try:
        yield
    finally:
        _attend = compiled


class Attention(nn.Module):
    """Residual self-attention of two heads; x is (B, L, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, *, mask: BlockMask) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return x + self.out(self.attend(q, k, v, mask).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
        """(B, heads, L, width of a head), each."""
        attended: Tensor = _attend(q, k, v, block_mask=mask)
        return attended


class BiasedAttention(Attention):
    """Its scores have a learned bias, and each head a learned sink."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(2))
        self.sink = nn.Parameter(torch.randn(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
        bias = self.bias

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + bias[h] * (i - j) * 0.1

        attended, aux = _attend(
            q, k, v, block_mask=mask, score_mod=score_mod, return_aux=flex.AuxRequest(lse=True)
        )
        kept: Tensor = torch.sigmoid(aux.lse - self.sink.unsqueeze(1)).unsqueeze(-1)
        return attended * kept


def modules(num_stages: int) -> list[Attention]:
    """One for each stage, the same in every process."""
    torch.manual_seed(0)
    return [*(Attention() for _ in range(num_stages - 1)), BiasedAttention()]


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def mask_of(documents: Tensor) -> BlockMask:
    """Causal within documents; (B, LENGTH) numbers of documents."""

    def same(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return documents[b, q] == documents[b, k]

    shape = (len(documents), None, LENGTH, LENGTH)
    return create_block_mask(and_masks(causal, same), *shape, device="cpu", BLOCK_SIZE=BLOCK)


def batch(seed: int, num_microbatches: int = NUM_MICROBATCHES) -> tuple[Tensor, Tensor, Tensor]:
    """Activations, targets, and documents, of all microbatches."""
    generator = torch.Generator().manual_seed(seed)
    num_samples = num_microbatches * MICROBATCH_SIZE
    shape = (num_samples, LENGTH, WIDTH)
    starts = torch.rand(num_samples, LENGTH, generator=generator) < 0.1
    x, target = (torch.randn(shape, generator=generator) for _ in range(2))
    return x, target, starts.int().cumsum(1)


def first_microbatch(num_microbatches: int = NUM_MICROBATCHES) -> MicrobatchInputs:
    """Of batch 0, split as the runner does."""
    x, target, documents = batch(0, num_microbatches)
    return split_microbatches(
        (x,),
        {"mask": mask_of(documents)},
        target,
        num_microbatches=num_microbatches,
        dims=MicrobatchDims(),
    )[0]


def captured(
    parts: Sequence[nn.Module],
    indices: Sequence[int],
    num_microbatches: int = NUM_MICROBATCHES,
    **options: Any,
) -> list[GraphPipelineStage]:
    """Some stages of all, captured with further ``options``."""
    inputs = first_microbatch(num_microbatches)
    stages: list[GraphPipelineStage] = []
    for index in indices:
        stages.append(
            GraphPipelineStage(
                parts[index],
                stage_index=index,
                num_stages=len(parts),
                activations=() if index == 0 else (inputs.args[0].clone().requires_grad_(),),
                inputs=inputs,
                loss_fn=squared_error if index == len(parts) - 1 else None,
                fake_mode=stages[0].fake_mode if stages else None,
                **options,
            )
        )
    return stages


def outline_attention(
    graph_module: GraphModule, kind: PipelineAction, context: PassContext
) -> None:
    """The regions that Inductor would compile on a GPU, without compiling them."""
    attention = CompileFlexAttention(compiler=DescribeOnly())
    PassManager([attention], context=context).run(graph_module)


def step(
    stages: Sequence[GraphPipelineStage], schedule: Schedule, seed: int
) -> tuple[StepResult, StepResult]:
    """What evaluation and a training step of one batch return; its mask is given whole."""
    x, target, documents = batch(seed, schedule.num_microbatches)
    mask = mask_of(documents)
    with GraphPPRunner(stages, schedule) as runner:
        evaluated = runner.eval(x, mask=mask, target=target)
        return evaluated, runner.step(x, mask=mask, target=target)


def eager_losses(
    parts: Sequence[nn.Module], seed: int, num_microbatches: int = NUM_MICROBATCHES
) -> list[Tensor]:
    """Of each microbatch, under a mask made for its own samples."""
    losses = []
    parts_of_batch = (each.split(MICROBATCH_SIZE) for each in batch(seed, num_microbatches))
    for x, target, documents in zip(*parts_of_batch, strict=True):
        mask = mask_of(documents)
        for part in parts:
            x = part(x, mask=mask)
        losses.append(squared_error(x, target))
    return losses


def train_eagerly(parts: Sequence[nn.Module], seed: int) -> list[Tensor]:
    """Adds gradients of the mean of the losses, one microbatch after the other."""
    with uncompiled():
        losses = eager_losses(parts, seed)
    for loss in losses:
        loss.backward(torch.tensor(1 / NUM_MICROBATCHES))
    return [loss.detach() for loss in losses]


def taken_gradients(parts: Sequence[nn.Module]) -> list[Tensor]:
    """Gradients, which are reset."""
    found = []
    for part in parts:
        for parameter in part.parameters():
            assert parameter.grad is not None
            found.append(parameter.grad)
            parameter.grad = None
    return found


# ---- several ranks ------------------------------------------------------------------------------


def train_pipeline(name: str) -> tuple[list[str], int]:
    """Two stages a rank; what differs in any bit from one eager process, and how many losses."""
    size, rank = dist.get_world_size(), dist.get_rank()
    schedule = schedule_of(
        name, num_ranks=size, num_stages=2 * size, num_microbatches=NUM_MICROBATCHES
    )
    parts = modules(2 * size)
    with flex_attention_on_cpu():
        indices = schedule.stages_of_rank(rank)
        stages = captured(parts, indices)
        evaluated, trained = step(stages, schedule, 1)
        mine = [parts[index] for index in indices]
        gradients = taken_gradients(mine)
        expected = train_eagerly(parts, 1)
    wanted = taken_gradients(mine)
    differing = [
        title
        for title, result in (("evaluated", evaluated), ("trained", trained))
        if result.losses and not torch.equal(torch.stack(result.losses), torch.stack(expected))
    ]
    pairs = zip(gradients, wanted, strict=True)
    differing += [f"gradient {i}" for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
    return differing, len(trained.losses)


def train_sharded() -> list[str]:
    """A stage under FSDP; what differs from eager with the same point of reduction."""
    (module,) = modules(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    shard(module, mesh, mode="shard")
    seed = dist.get_rank()
    schedule = schedule_of("GPipe", num_ranks=1, num_stages=1, num_microbatches=2)
    with flex_attention_on_cpu():
        stages = captured([module], [0], 2)
        _, trained = step(stages, schedule, seed)
        gradients = taken_gradients([module])
        with gathered(module), uncompiled():
            expected = eager_losses([module], seed, 2)
        torch.autograd.backward(expected, [torch.tensor(1 / 2)] * 2)
    pairs = zip(gradients, taken_gradients([module]), strict=True)
    differing = [
        f"gradient {i}" for i, (a, b) in enumerate(pairs) if not torch.equal(_local(a), _local(b))
    ]
    if not torch.equal(torch.stack(trained.losses), torch.stack(expected)):
        differing.append("losses")
    return differing


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()
