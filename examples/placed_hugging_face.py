"""A Hugging Face BERT, placed by a solver on 4 processes, in a training loop of its own.

::

    pip install transformers
    pip install ./packages/gt-config ./packages/gt-trace ./packages/gt-passes
    pip install ./packages/gt-autoparallel
    torchrun --standalone --nproc-per-node 4 examples/placed_hugging_face.py

The ranks are two data-parallel pairs (of 2 processes, two single ones); along which axis each
weight and each activation is cut, the solver says. The model is transformers' own, small and with
random weights, so that nothing is downloaded. Afterwards the losses are compared with those of
training in one process.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from transformers import BertConfig, BertForMaskedLM

from gt_autoparallel import place, plan_report

CONFIG = BertConfig(
    vocab_size=128,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=128,
    # Ranks would draw different numbers, and the planner says so.
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
BATCH, LENGTH, NUM_STEPS = 8, 16, 5
MASKED = 0


class BertLogits(nn.Module):
    """BERT as a function from tokens to logits: what a placed model returns must be tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = BertForMaskedLM(CONFIG)

    def forward(self, tokens: Tensor) -> Tensor:
        """From int64[batch, length] to float32[batch, length, vocabulary]."""
        logits: Tensor = self.bert(input_ids=tokens).logits
        return logits


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Sequences that count up from somewhere, every third token of them masked; and all tokens."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(1, CONFIG.vocab_size, (BATCH, 1), generator=generator)
    labels = (first + torch.arange(LENGTH)) % CONFIG.vocab_size
    return labels.where(torch.arange(LENGTH) % 3 != 0, MASKED), labels


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def mesh_of_ranks() -> DeviceMesh:
    """Two parts of every batch, and as many ranks for each part as there are."""
    num_ranks = dist.get_world_size()
    if num_ranks == 2:  # an axis of one rank could cut nothing, and is refused
        return init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    return init_device_mesh("cpu", (2, num_ranks // 2), mesh_dim_names=("data", "model"))


# [start: loop]
def train_placed() -> list[float]:
    """Train on this rank: the loop that a user writes. Losses over all ranks."""
    mesh = mesh_of_ranks()
    torch.manual_seed(0)  # every rank has the same weights, of which it keeps its shards
    model = BertLogits()
    plan = place(model, mesh, batch(0)[:1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    history = []
    for step in range(NUM_STEPS):
        tokens, labels = (each.chunk(2)[mesh.get_local_rank("data")] for each in batch(step))
        loss = loss_of(model(tokens), labels) / mesh.size(0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss, group=mesh.get_group("data"))
        history.append(loss.item())
    if dist.get_rank() == 0:
        print(plan_report(plan))
    return history


# [end: loop]


def train_alone() -> list[float]:
    """The same in one process."""
    torch.manual_seed(0)
    model = BertLogits()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    history = []
    for step in range(NUM_STEPS):
        tokens, labels = batch(step)
        loss = loss_of(model(tokens), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(loss.item())
    return history


def main() -> None:
    """Train on this rank, and compare with one process."""
    dist.init_process_group("gloo")
    placed = train_placed()
    if dist.get_rank() == 0:
        alone = train_alone()
        for step, loss in enumerate(placed):
            print(f"step {step}: loss {loss:.4f}")
        error = max(abs(a / b - 1) for a, b in zip(placed, alone, strict=True))
        print(f"largest relative difference from one process: {error:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
