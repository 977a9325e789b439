"""A plain PyTorch training loop as a pipeline on 4 processes.

::

    pip install ./packages/gt-config ./packages/gt-pipeline
    torchrun --standalone --nproc-per-node 4 examples/plain_pytorch.py --schedule ZBVZeroBubble

The model is any nn.Module; here a small decoder that learns to count. Splitting it and building a
schedule need nothing else but torch. With gt-pipeline[graph], ``--runtimes graph`` runs the same
stages as captured graphs; the losses are the same.
"""

import argparse
import copy
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.nn import functional as F

from gt_pipeline.schedules import SCHEDULE_NAMES, build_pipeline_schedule, schedule_of
from gt_pipeline.split import (
    LayerNaming,
    check_splittable,
    module_names_per_stage,
    pipeline_metadata,
    stage_indices_of_rank,
    stage_modules,
)

NUM_LAYERS, WIDTH, VOCABULARY, LENGTH = 8, 32, 64, 16
NUM_MICROBATCHES, MICROBATCH = 8, 4
LEARNING_RATE = 1e-2

Step = Callable[[Tensor, Tensor], list[Tensor]]
"""Runs one batch through the pipeline, leaves gradients in ``grad``, returns losses."""

# What the model calls its parts: all that splitting by layers needs to know of it.
NAMING = LayerNaming(first=("embed",), layers="layers", last=("norm", "head"))


class Layer(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Add both to the residual stream, of shape (batch, length, width)."""
        query, key, value = self.qkv(F.layer_norm(hidden, (WIDTH,))).chunk(3, dim=-1)
        hidden = hidden + F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return hidden + self.down(F.gelu(self.up(F.layer_norm(hidden, (WIDTH,)))))


class Decoder(nn.Module):
    """Splits as it is, since its forward skips a child that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(NUM_LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """From tokens, or what the stage before returned, to logits, or what this stage has."""
        hidden = tokens if self.embed is None else self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        hidden = hidden if self.norm is None else self.norm(hidden)
        return hidden if self.head is None else self.head(hidden)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Sequences that count up from somewhere, and their next tokens."""
    generator = torch.Generator().manual_seed(step)
    size = NUM_MICROBATCHES * MICROBATCH
    first = torch.randint(0, VOCABULARY, (size, 1), generator=generator)
    counted = (first + torch.arange(LENGTH + 1)) % VOCABULARY
    return counted[:, :-1], counted[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of one microbatch."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def eager_pipeline(
    modules: Mapping[int, nn.Module], *, num_stages: int, schedule_name: str
) -> Step:
    """PyTorch's own pipeline runtime: every action calls the module, or autograd."""
    # Stages that are not told their shapes send them to one another, for which PyTorch needs NumPy.
    tokens = batch(0)[0][:MICROBATCH]
    hidden = torch.empty(MICROBATCH, LENGTH, WIDTH, requires_grad=True)
    logits = torch.empty(MICROBATCH, LENGTH, VOCABULARY, requires_grad=True)
    stages = [
        PipelineStage(
            module,
            index,
            num_stages,
            torch.device("cpu"),
            input_args=hidden if index else tokens,
            output_args=logits if index == num_stages - 1 else hidden,
        )
        for index, module in modules.items()
    ]
    schedule = build_pipeline_schedule(
        stages,
        name=schedule_name,
        num_microbatches=NUM_MICROBATCHES,
        loss_fn=loss_of,
    )

    def step(tokens: Tensor, targets: Tensor) -> list[Tensor]:
        inputs = (tokens,) if 0 in modules else ()
        losses: list[Tensor] = []
        if num_stages - 1 in modules:
            schedule.step(*inputs, target=targets, losses=losses)
        else:
            schedule.step(*inputs)
        # The loss is a mean over a microbatch, and PyTorch sums the gradients of all of them.
        for module in modules.values():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad /= NUM_MICROBATCHES
        return losses

    return step


def graph_pipeline(
    modules: Mapping[int, nn.Module], *, num_stages: int, schedule_name: str
) -> Step:
    """Graphs captured before the first step, one for each action; no autograd while they run."""
    # Needs gt-pipeline[graph].
    from gt_pipeline.graph import GraphPipelineStage
    from gt_pipeline.runner import ActivationSignature, GraphPPRunner, MicrobatchInputs

    tokens, targets = batch(0)
    example = MicrobatchInputs(args=(tokens[:MICROBATCH],), target=targets[:MICROBATCH])
    hidden = ActivationSignature(
        shape=(MICROBATCH, LENGTH, WIDTH), dtype=torch.float32, requires_grad=True
    )
    stages: list[GraphPipelineStage] = []
    for index, module in modules.items():
        stages.append(
            GraphPipelineStage(
                module,
                stage_index=index,
                num_stages=num_stages,
                activations=(hidden,) if index else (),
                inputs=example,
                loss_fn=loss_of if index == num_stages - 1 else None,
                # Stages of one rank can overlap if their graphs were captured together.
                fake_mode=stages[0].fake_mode if stages else None,
            )
        )
    schedule = schedule_of(
        schedule_name,
        num_ranks=dist.get_world_size(),
        num_stages=num_stages,
        num_microbatches=NUM_MICROBATCHES,
    )
    runner = GraphPPRunner(stages, schedule)

    def step(tokens: Tensor, targets: Tensor) -> list[Tensor]:
        return list(runner.step(tokens, target=targets).losses)

    return step


PIPELINES = {"eager": eager_pipeline, "graph": graph_pipeline}


def train_pipelined(
    model: nn.Module, *, runtime: str, schedule_name: str, num_steps: int
) -> list[float]:
    """Train this rank's stages of the model; the losses, on every rank."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    numbers = pipeline_metadata(NUM_LAYERS, schedule=schedule_name, pp_degree=num_ranks)
    names = module_names_per_stage(NUM_LAYERS, num_stages=numbers.num_stages, naming=NAMING)
    check_splittable(model, names, (batch(0)[0][:MICROBATCH],))
    mine = stage_indices_of_rank(rank, num_ranks, numbers.num_stages, style=numbers.style)
    modules = stage_modules(model, names, mine)
    if rank == 0:
        for index, listed in enumerate(names):
            print(f"stage {index}: {', '.join(listed)}")

    step = PIPELINES[runtime](modules, num_stages=numbers.num_stages, schedule_name=schedule_name)
    parameters = [each for module in modules.values() for each in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE)
    history = torch.zeros(num_steps)
    for index in range(num_steps):
        optimizer.zero_grad()
        losses = step(*batch(index))
        optimizer.step()
        if losses:
            history[index] = torch.stack(losses).mean()
    # Only the rank with the last stage has losses, the others zeros.
    dist.all_reduce(history)
    return history.tolist()


def train_alone(model: nn.Module, num_steps: int) -> list[float]:
    """The same training without a pipeline, microbatch by microbatch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    history = []
    for step in range(num_steps):
        tokens, targets = batch(step)
        optimizer.zero_grad()
        losses = []
        for some, wanted in zip(tokens.split(MICROBATCH), targets.split(MICROBATCH), strict=True):
            losses.append(loss_of(model(some), wanted))
            losses[-1].backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= NUM_MICROBATCHES
        optimizer.step()
        history.append(torch.stack(losses).mean().item())
    return history


def main() -> None:
    """Train on this rank, and compare with training in one process."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--schedule", default="Interleaved1F1B", choices=SCHEDULE_NAMES)
    parser.add_argument("--runtimes", nargs="+", default=["eager"], choices=list(PIPELINES))
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Decoder()
    for runtime in options.runtimes:
        history = train_pipelined(
            model, runtime=runtime, schedule_name=options.schedule, num_steps=options.steps
        )
        if dist.get_rank() == 0:
            for step, loss in enumerate(history):
                print(f"{runtime}: step {step}: loss {loss:.4f}")
            same = history == train_alone(copy.deepcopy(model), options.steps)
            print(
                f"{runtime}: every loss is that of training without a pipeline, to the bit: {same}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
