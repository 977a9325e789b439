"""An unmodified Hugging Face Llama as a pipeline of tensor-parallel stages, on 4 processes.

::

    pip install ./packages/gt-config ./packages/gt-trace ./packages/gt-passes transformers
    pip install "./packages/gt-pipeline[graph]"
    torchrun --standalone --nproc-per-node 4 examples/tensor_parallel_pipeline.py

Two stages, each on two processes that share its matrices as torch's own ``parallelize_module``
says. The model is what transformers makes, with random weights, so that nothing is downloaded: a
hook lets it return a tensor, since only tensors pass between stages. Each stage runs as captured
graphs, one for each action of the schedule. Losses are compared with those of one process.
"""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from gt_pipeline.graph import GraphPipelineStage
from gt_pipeline.runner import ActivationSignature, GraphPPRunner, MicrobatchInputs
from gt_pipeline.schedules import schedule_of
from gt_pipeline.split import (
    RemovalPolicy,
    check_splittable,
    find_naming,
    module_names_per_stage,
    stage_modules,
)

CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=128,
    use_cache=False,
)
LENGTH, NUM_MICROBATCHES, MICROBATCH, NUM_STEPS = 32, 4, 2, 5
POLICY = RemovalPolicy(attribute="identity")  # its forward calls every child
TENSOR_PARALLEL = {
    **{f"layers.*.self_attn.{each}_proj": ColwiseParallel() for each in "qkv"},
    "layers.*.self_attn.o_proj": RowwiseParallel(),
    "layers.*.mlp.gate_proj": ColwiseParallel(),
    "layers.*.mlp.up_proj": ColwiseParallel(),
    "layers.*.mlp.down_proj": RowwiseParallel(),
}


def llama() -> nn.Module:
    """Llama that returns one tensor."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    model.register_forward_hook(lambda module, inputs, output: output.logits)
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Sequences that count up from somewhere, and their next tokens."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(0, 128, (NUM_MICROBATCHES * MICROBATCH, 1), generator=generator)
    counted = (first + torch.arange(LENGTH + 1)) % 128
    return counted[:, :-1], counted[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of one microbatch."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# [start: runner]
def runner_of(model: nn.Module, mesh: DeviceMesh) -> tuple[GraphPPRunner, nn.Module]:
    """The pipeline, and this rank's part of the model."""
    num_stages, index = mesh.size(0), mesh.get_local_rank("pp")
    names = module_names_per_stage(
        CONFIG.num_hidden_layers, num_stages=num_stages, naming=find_naming(model)
    )
    tokens, targets = (each[:MICROBATCH] for each in batch(0))
    check_splittable(model, names, (tokens,), policy=POLICY)
    module = stage_modules(model, names, (index,), policy=POLICY)[index]
    parallelize_module(module.model, mesh["tp"], TENSOR_PARALLEL)
    hidden = ActivationSignature(
        shape=(MICROBATCH, LENGTH, CONFIG.hidden_size), dtype=torch.float32, requires_grad=True
    )
    stage = GraphPipelineStage(
        module,
        stage_index=index,
        num_stages=num_stages,
        activations=(hidden,) if index else (),
        inputs=MicrobatchInputs(args=(tokens,), target=targets),
        loss_fn=loss_of if index == num_stages - 1 else None,
    )
    pp, tp = mesh.get_group("pp"), mesh.get_group("tp")
    schedule = schedule_of(
        "1F1B", num_ranks=num_stages, num_stages=num_stages, num_microbatches=NUM_MICROBATCHES
    )
    return GraphPPRunner([stage], schedule, group=pp, collective_groups=[tp]), module


# [end: runner]


def train_pipelined(model: nn.Module) -> list[float]:
    """Train on this rank; losses on those of the last stage."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "tp"))
    runner, module = runner_of(model, mesh)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    history = []
    for index in range(NUM_STEPS):
        optimizer.zero_grad()
        tokens, targets = batch(index)
        losses = runner.step(tokens, target=targets).losses
        optimizer.step()
        if losses:
            history.append(torch.stack(tuple(losses)).mean().item())
    return history


def train_alone(model: nn.Module) -> list[float]:
    """The same in one process, without a pipeline."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    history = []
    for index in range(NUM_STEPS):
        optimizer.zero_grad()
        tokens, targets = batch(index)
        loss = loss_of(model(tokens), targets)
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    return history


def main() -> None:
    """Train on this rank; the last one compares."""
    dist.init_process_group("gloo")
    model = llama()
    pipelined = train_pipelined(copy.deepcopy(model))
    if dist.get_rank() == dist.get_world_size() - 1:
        alone = train_alone(model)
        for step, loss in enumerate(pipelined):
            print(f"step {step}: loss {loss:.4f}")
        error = max(abs(a / b - 1) for a, b in zip(pipelined, alone, strict=True))
        print(f"largest relative difference from one process: {error:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
