"""Models and cells that the tests of ``simple_fsdp`` run, on gloo workers or in a fake world.

Everything here is imported by worker processes, by name. A *cell* is one model, placement and
precision; both our sharding and torch's FSDP2 train it from the same start on the same batches.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from gt_trace.fsdp import MixedPrecision, ShardedModel, ShardingMode, shard
from gt_trace.fsdp.collectives import GradientReduction

VOCAB = 13

DTYPES: dict[str, dict[str, torch.dtype]] = {
    "fp32": {},
    "bf16": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "bf16_params": {"param_dtype": torch.bfloat16},
    "fp16": {"param_dtype": torch.float16, "reduce_dtype": torch.float16},
}


class Block(nn.Module):
    """A residual block whose extents no number of ranks divides."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)
        self.scale = nn.Parameter(torch.ones(1))
        """One element: from two ranks on, some rank's shard is empty."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.relu(self.up(self.norm(x))))


class Language(nn.Module):
    """Tokens (B, T) to logits (B, T, V); optionally embedding and head are one weight."""

    def __init__(self, *, tied: bool = True, dim: int = 6, hidden: int = 11) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList([Block(dim, hidden), Block(dim, hidden)])
        self.head = nn.Linear(dim, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Experts(nn.Module):
    """Two experts as one parameter (E, H, D), as mixture-of-experts layers hold them."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, hidden, dim) / 4)
        self.down = nn.Parameter(torch.randn(2, dim, hidden) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(torch.einsum("btd,ehd->beth", x, self.up))
        return torch.einsum("beth,edh->btd", h, self.down)


class Mixture(nn.Module):
    """A model whose experts are sharded otherwise than the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 8)
        self.experts = Experts(8, 4)
        self.head = nn.Linear(8, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return self.head(x + self.experts(x))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One comparison. Data parallelism over ``extents``, then tensor parallelism over ``tp``."""

    mode: ShardingMode
    extents: tuple[int, ...]
    model: Literal["tied", "untied", "experts_dim_1"] = "tied"
    reduction: GradientReduction = "avg"
    precision: Literal["fp32", "bf16", "bf16_params", "fp16"] = "fp32"
    tp: int = 1
    hidden: int = 11
    """Of a language model without tensor parallelism; with it, 8."""

    def __str__(self) -> str:
        words = [self.mode, "x".join(map(str, self.extents)), self.model, self.reduction]
        words += [self.precision] * (self.precision != "fp32") + [f"tp{self.tp}"] * (self.tp > 1)
        return "-".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a run of training left on this rank. Tensors are this rank's shards."""

    losses: list[float]
    first_gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    placements: dict[str, str]


@functools.cache
def mesh_of(extents: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """One mesh, hence one set of process groups, for all cells of that form."""
    return init_device_mesh("cpu", extents, mesh_dim_names=names)


def data_parallel_names(mode: ShardingMode) -> tuple[str, ...]:
    """Names of the data-parallel mesh axes of a mode."""
    if mode == "hybrid_shard":
        return ("replicate", "shard")
    return ("replicate",) if mode == "replicate" else ("shard",)


def meshes(cell: Cell) -> tuple[DeviceMesh, DeviceMesh | None]:
    """The data-parallel mesh and, if there is one, the tensor-parallel mesh."""
    names = data_parallel_names(cell.mode)
    if cell.tp == 1:
        return mesh_of(cell.extents, names), None
    whole = mesh_of((*cell.extents, cell.tp), (*names, "tp"))
    return whole[names], whole["tp"]


def build(cell: Cell) -> nn.Module:
    """The cell's model, equal on all ranks, on its tensor-parallel mesh if it has one."""
    torch.manual_seed(0)
    if cell.model == "experts_dim_1":
        return Mixture()
    model = Language(tied=cell.model == "tied", hidden=cell.hidden if cell.tp == 1 else 8)
    _, tensor_parallel = meshes(cell)
    if tensor_parallel is not None:
        # Placements Shard(0) for `up`, Shard(1) and Replicate for `down`; the rest stays plain.
        for block in model.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, tensor_parallel, plan)
    return model


def shard_ours(model: nn.Module, cell: Cell) -> list[ShardedModel]:
    """Shard with ``simple_fsdp``."""
    mesh, _ = meshes(cell)
    options: dict[str, Any] = {
        "mode": cell.mode,
        "mixed_precision": MixedPrecision(**DTYPES[cell.precision]),
        "reduction": cell.reduction,
    }
    handles: list[ShardedModel] = []
    if isinstance(model, Mixture):
        handles.append(shard(model.experts, mesh, shard_dim=1, prefix="experts", **options))
    handles.append(shard(model, mesh, **options))
    return handles


def shard_fsdp2(model: nn.Module, cell: Cell) -> None:
    """Shard with torch: blocks first, then the root, as is usual.

    The reference of mode "replicate" is torch's replicate on the machinery of FSDP2, not
    DistributedDataParallel, which has no mixed precision of that kind and divides first.
    """
    mesh, _ = meshes(cell)
    # What no reduce_dtype means to FSDP2 changed in torch 2.15; said here, it is what ours means.
    policy = MixedPrecisionPolicy(**({"reduce_dtype": torch.float32} | DTYPES[cell.precision]))
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    apply = replicate if cell.mode == "replicate" else fully_shard
    if isinstance(model, Mixture):
        placed = options if cell.mode == "replicate" else options | {"shard_placement_fn": _dim_1}
        apply(model.experts, **placed)
    else:
        for block in model.blocks:
            apply(block, **options)
    apply(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no average
            if cell.reduction == "sum":
                module.set_gradient_divide_factor(1.0)


def _dim_1(parameter: nn.Parameter) -> Shard:
    return Shard(1)


def batch(cell: Cell, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels (2, 5): another batch for each step and data-parallel rank."""
    data_rank = dist.get_rank() // cell.tp
    generator = torch.Generator().manual_seed(1000 * step + data_rank)
    tokens = torch.randint(0, VOCAB, (2, 6), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in float32."""
    logits = model(tokens).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def train(model: nn.Module, cell: Cell, *, steps: int) -> Trained:
    """Adam steps on the cell's batches."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)
    losses: list[float] = []
    first: dict[str, torch.Tensor] = {}
    for step in range(steps):
        loss = loss_of(model, *batch(cell, step))
        loss.backward()
        if step == 0:
            first = {n: local(p.grad).clone() for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    named = dict(model.named_parameters())
    return Trained(
        losses=losses,
        first_gradients=first,
        parameters={name: local(parameter).clone() for name, parameter in named.items()},
        placements={
            name: f"{parameter.device_mesh.mesh_dim_names} {parameter.placements}"
            for name, parameter in named.items()
            if isinstance(parameter, DTensor)
        },
    )


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over norm."""
    difference = torch.linalg.vector_norm(actual.double() - expected.double())
    if difference == 0:
        return 0.0
    return (difference / torch.linalg.vector_norm(expected.double())).item()


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Ours against FSDP2 on one rank."""

    placements_agree: bool
    losses_differ: list[int]
    """Steps whose losses are not equal to the last bit."""

    gradients_differ: list[str]
    parameters_differ: list[str]
    loss_error: float
    gradient_error: float
    """The worst relative error of a gradient of step 1, over the shards of all ranks."""

    @property
    def is_bitwise(self) -> bool:
        return not (self.losses_differ or self.gradients_differ or self.parameters_differ)


def compare_with_fsdp2(cell: Cell, steps: int) -> Comparison:
    """Train the cell both ways."""
    ours, reference = build(cell), build(cell)
    shard_ours(ours, cell)
    shard_fsdp2(reference, cell)
    mine, theirs = train(ours, cell, steps=steps), train(reference, cell, steps=steps)
    return Comparison(
        placements_agree=mine.placements == theirs.placements,
        losses_differ=[
            step
            for step, (a, b) in enumerate(zip(mine.losses, theirs.losses, strict=True))
            if a != b
        ],
        gradients_differ=_differences(mine.first_gradients, theirs.first_gradients),
        parameters_differ=_differences(mine.parameters, theirs.parameters),
        loss_error=max(
            abs(a - b) / abs(b) for a, b in zip(mine.losses, theirs.losses, strict=True)
        ),
        gradient_error=max(
            relative(mine.first_gradients[name], theirs.first_gradients[name])
            for name in theirs.first_gradients
        ),
    )


def _differences(
    mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], *, in_order: bool = True
) -> list[str]:
    assert list(mine) == list(theirs) if in_order else mine.keys() == theirs.keys()
    return [
        name
        for name in theirs
        if mine[name].dtype != theirs[name].dtype or not torch.equal(mine[name], theirs[name])
    ]


def matches_distributed_data_parallel(steps: int) -> bool:
    """Whether mode "replicate" trains to the same bits as torch's DistributedDataParallel."""
    cell = Cell(mode="replicate", extents=(dist.get_world_size(),))
    ours, reference = build(cell), build(cell)
    shard_ours(ours, cell)
    mine = train(ours, cell, steps=steps)
    theirs = train(nn.parallel.DistributedDataParallel(reference), cell, steps=steps)
    return mine.losses == theirs.losses and all(
        torch.equal(a, b)
        for a, b in zip(mine.parameters.values(), theirs.parameters.values(), strict=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """Names of parameters whose first gradient differs in some bit, on one rank."""

    alone_differ_from_ours: list[str]
    joined_differ_from_fsdp2: list[str]
    alone_differ_from_joined: list[str]


def gradients_of_both_layouts(cell: Cell) -> Layouts:
    """Reduce one step's gradients by hand, one by one and in FSDP2's messages."""
    ours, reference, plain = build(cell), build(cell), build(cell)
    shard_ours(ours, cell)
    shard_fsdp2(reference, cell)
    mine, theirs = train(ours, cell, steps=1), train(reference, cell, steps=1)
    loss_of(plain, *batch(cell, 0)).backward()
    whole = {name: parameter.grad for name, parameter in plain.named_parameters()}
    # A message of FSDP2 holds the gradients of one call of fully_shard, those of submodules first.
    blocks = [
        sorted((n for n in whole if n.startswith(f"blocks.{at}.")), key=lambda n: "scale" in n)
        for at in range(2)
    ]
    rest = [n for n in whole if not n.startswith("blocks.")]
    alone: dict[str, torch.Tensor] = {}
    joined: dict[str, torch.Tensor] = {}
    for names in (*blocks, rest):
        for name in names:
            alone |= _reduce_message({name: whole[name]}, cell)
        joined |= _reduce_message({name: whole[name] for name in names}, cell)
    return Layouts(
        alone_differ_from_ours=_differences(mine.first_gradients, alone, in_order=False),
        joined_differ_from_fsdp2=_differences(theirs.first_gradients, joined, in_order=False),
        alone_differ_from_joined=_differences(alone, joined),
    )


def _reduce_message(gradients: dict[str, torch.Tensor], cell: Cell) -> dict[str, torch.Tensor]:
    """This rank's shards of the reduced gradients, sent as one flat message."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    divisor = ranks if cell.reduction == "avg" else 1
    if cell.mode == "replicate":
        message = torch.cat([g.flatten() for g in gradients.values()])
        dist.all_reduce(message)
        parts = message.split([g.numel() for g in gradients.values()])
        return {
            name: (part / divisor).view_as(gradient)
            for part, (name, gradient) in zip(parts, gradients.items(), strict=True)
        }
    chunks = {name: -(-gradient.shape[0] // ranks) for name, gradient in gradients.items()}
    padded = {
        name: torch.cat([g, g.new_zeros(chunks[name] * ranks - g.shape[0], *g.shape[1:])])
        for name, g in gradients.items()
    }
    # All that goes to rank 0, then all that goes to rank 1, and so on.
    message = torch.cat([g.view(ranks, -1) for g in padded.values()], dim=1).flatten()
    mine = message.new_empty(message.numel() // ranks)
    dist.reduce_scatter_tensor(mine, message)
    parts = mine.split([g.numel() // ranks for g in padded.values()])
    reduced: dict[str, torch.Tensor] = {}
    for part, (name, gradient) in zip(parts, gradients.items(), strict=True):
        start = min(rank * chunks[name], gradient.shape[0])
        size = min(chunks[name], gradient.shape[0] - start)
        reduced[name] = (part / divisor).view(-1, *gradient.shape[1:])[:size]
    return reduced
