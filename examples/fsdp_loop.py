"""A plain FSDP training loop whose step is captured, rewritten by verified passes, and run.

::

    pip install ./packages/gt-config ./packages/gt-trace ./packages/gt-passes
    torchrun --standalone --nproc-per-node 2 examples/fsdp_loop.py

What a loop with torch's FSDP2 or DDP changes, and nothing else:

1. ``fully_shard(model, mesh=mesh)`` becomes ``shard(model, mesh, mode="shard")``, once for the
   whole model; ``DistributedDataParallel(model)`` becomes ``mode="replicate"``. FSDP2 and DDP work
   by hooks and streams that a trace cannot see; ``shard`` writes the same collectives into the
   graph. Parameters are DTensors, placed as FSDP2 places them, so its checkpoints fit.
2. ``loss.backward()`` becomes ``torch.autograd.grad``: a captured step returns its gradients.
3. Which blocks are gathered together, and when, is no call in the model any more: passes decide.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from gt_passes import exchange_collective_digest, optimize
from gt_trace import phase, trace_step
from gt_trace.fsdp import shard

WIDTH, VOCABULARY, LENGTH, BATCH, NUM_STEPS = 64, 128, 32, 4, 20


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
    """A model as it would be without this project."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """From int64[batch, length] to float32[batch, length, vocabulary]."""
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def batch(index: int) -> tuple[Tensor, Tensor]:
    """This rank's sequences, which count up from somewhere, and their next tokens."""
    generator = torch.Generator().manual_seed(index * dist.get_world_size() + dist.get_rank())
    first = torch.randint(0, VOCABULARY, (BATCH, 1), generator=generator)
    counted = (first + torch.arange(LENGTH + 1)) % VOCABULARY
    return counted[:, :-1], counted[:, 1:]


def train(*, captured: bool) -> list[float]:
    """Train on this rank, with the step captured or run eagerly; the losses of this rank."""
    torch.manual_seed(0)  # every rank has the same weights, of which it keeps its shards
    model = Decoder()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    shard(model, mesh, mode="shard")
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)

    # [start: step]
    def step(tokens: Tensor, targets: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        logits = model(tokens)
        with phase("loss"):
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss, torch.autograd.grad(loss, parameters)

    run = step
    if captured:
        traced = trace_step(step, module=model)(*batch(0))  # shapes matter, values do not
        report = optimize(traced)  # the default recipe, each pass verified
        exchange_collective_digest(traced.graph_module)  # all ranks do the same, or say who not
        run = traced.bind(model)
        if dist.get_rank() == 0:
            print(report)
    # [end: step]

    history = []
    for index in range(NUM_STEPS):
        loss, gradients = run(*batch(index))
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        history.append(loss.item())
    return history


def main() -> None:
    """Train twice on this rank, and compare."""
    dist.init_process_group("gloo")
    captured = train(captured=True)
    same = captured == train(captured=False)
    if dist.get_rank() == 0:
        print(f"loss {captured[0]:.3f} at first, {captured[-1]:.3f} after {NUM_STEPS} steps")
        print(f"every loss is that of the eager loop, to the bit: {same}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
