"""A Hugging Face Llama, trained as a pipeline on 4 processes.

::

    pip install ./packages/gt-config ./packages/gt-pipeline transformers
    torchrun --standalone --nproc-per-node 4 examples/hugging_face_llama.py --schedule 1F1B

The model is transformers' own, small and with random weights, so that nothing is downloaded. Its
forward calls every child, so what a stage lacks is replaced by a module that passes its argument
on; and it returns logits alone, since only tensors pass between stages. With gt-pipeline[graph],
``--runtimes graph`` runs the same stages as captured graphs; the gradients are the same.
"""

import argparse
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from gt_pipeline.schedules import SCHEDULE_NAMES, build_pipeline_schedule, schedule_of
from gt_pipeline.split import (
    RemovalPolicy,
    check_splittable,
    find_naming,
    measure_module_costs,
    module_names_by_cost,
    pipeline_metadata,
    stage_indices_of_rank,
    stage_modules,
)

CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=128,
    use_cache=False,
)
LENGTH, NUM_MICROBATCHES, MICROBATCH = 32, 8, 2
Step = Callable[[Tensor, Tensor], list[Tensor]]
"""Runs one batch through the pipeline, leaves gradients in ``grad``, returns losses."""

POLICY = RemovalPolicy(attribute="identity")


class LlamaLogits(LlamaForCausalLM):
    """Llama that takes tokens, or what the stage before returned, and returns one tensor."""

    def forward(self, tokens: Tensor) -> Tensor:
        """From int64[batch, length] to float32[batch, length, vocabulary], on a whole model."""
        # Not super().forward: it slices before lm_head, and the result of a slice is a view, which
        # PyTorch's zero-bubble schedules cannot detach.
        logits: Tensor = self.lm_head(self.model(input_ids=tokens).last_hidden_state)
        return logits


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Sequences that count up from somewhere, and their next tokens."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(0, 128, (NUM_MICROBATCHES * MICROBATCH, 1), generator=generator)
    counted = (first + torch.arange(LENGTH + 1)) % 128
    return counted[:, :-1], counted[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of one microbatch."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def balanced_names(model: nn.Module, num_stages: int) -> tuple[tuple[str, ...], ...]:
    """Names of the modules of each stage, such that the slowest stage is as fast as it can be."""
    naming = find_naming(model)
    tokens = batch(0)[0][:MICROBATCH]
    names = [()]
    # Every rank would measure a little differently, and all must split alike.
    if dist.get_rank() == 0:
        costs = measure_module_costs(model, naming.names_of(model), lambda: model(tokens))
        names = [module_names_by_cost(costs, num_stages=num_stages, every_stage=naming.every_stage)]
    dist.broadcast_object_list(names, src=0)
    return names[0]


def eager_pipeline(
    modules: Mapping[int, nn.Module], *, num_stages: int, schedule_name: str
) -> Step:
    """PyTorch's own pipeline runtime: every action calls the module, or autograd."""
    device = torch.device("cpu")
    stages = [PipelineStage(module, index, num_stages, device) for index, module in modules.items()]
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
        shape=(MICROBATCH, LENGTH, CONFIG.hidden_size), dtype=torch.float32, requires_grad=True
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
) -> tuple[list[float], dict[str, Tensor]]:
    """Train this rank's stages; losses and first gradients of all stages, on every rank."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    numbers = pipeline_metadata(
        CONFIG.num_hidden_layers, schedule=schedule_name, pp_degree=num_ranks
    )
    names = balanced_names(model, numbers.num_stages)
    check_splittable(model, names, (batch(0)[0][:MICROBATCH],), policy=POLICY)
    mine = stage_indices_of_rank(rank, num_ranks, numbers.num_stages, style=numbers.style)
    modules = stage_modules(model, names, mine, policy=POLICY)
    if rank == 0:
        for index, listed in enumerate(names):
            print(f"stage {index}: {', '.join(listed)}")

    step = PIPELINES[runtime](modules, num_stages=numbers.num_stages, schedule_name=schedule_name)
    # Names in a stage are those of the whole model: all stages' checkpoints are one of the model.
    parameters = dict(each for module in modules.values() for each in module.named_parameters())
    optimizer = torch.optim.AdamW(parameters.values(), lr=3e-3)
    history: list[float] = []
    gradients: dict[str, Tensor] = {}
    for index in range(num_steps):
        optimizer.zero_grad()
        losses = step(*batch(index))
        if index == 0:
            gradients = {name: each.grad.clone() for name, each in parameters.items()}
        optimizer.step()
        if losses:
            history.append(torch.stack(losses).mean().item())
    # Only the rank with the last stage has losses, and each has gradients of its stages.
    results: list[tuple[list[float], dict[str, Tensor]]] = [([], {}) for _ in range(num_ranks)]
    dist.all_gather_object(results, (history, gradients))
    return (
        max((losses for losses, _ in results), key=len),
        {name: gradient for _, each in results for name, gradient in each.items()},
    )


def gradients_alone(model: nn.Module) -> dict[str, Tensor]:
    """Gradients of the first step without a pipeline, microbatch by microbatch."""
    tokens, targets = batch(0)
    for some, wanted in zip(tokens.split(MICROBATCH), targets.split(MICROBATCH), strict=True):
        loss_of(model(some), wanted).backward()
    return {name: each.grad / NUM_MICROBATCHES for name, each in model.named_parameters()}


def main() -> None:
    """Train on this rank, and compare the first gradients with those of one process."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--schedule", default="1F1B", choices=SCHEDULE_NAMES)
    parser.add_argument("--runtimes", nargs="+", default=["eager"], choices=list(PIPELINES))
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = LlamaLogits(CONFIG)
    expected = None
    for runtime in options.runtimes:
        history, gradients = train_pipelined(
            model, runtime=runtime, schedule_name=options.schedule, num_steps=options.steps
        )
        if dist.get_rank() == 0:
            for step, loss in enumerate(history):
                print(f"{runtime}: step {step}: loss {loss:.4f}")
            expected = gradients_alone(model) if expected is None else expected
            same = gradients.keys() == expected.keys() and all(
                torch.equal(value, expected[name]) for name, value in gradients.items()
            )
            print(
                f"{runtime}: {len(gradients)} gradients are those of training without a pipeline, "
                f"to the bit: {same}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
