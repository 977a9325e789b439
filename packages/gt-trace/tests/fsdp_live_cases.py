"""What gloo workers do with a sharded model besides training it. Each returns plain findings."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from fsdp_cases import Cell, batch, build, local, loss_of, shard_ours
from torch import nn

from gt_trace import trace_step
from gt_trace.fsdp import gathered


def undo_restores_every_value(cell: Cell) -> bool:
    """Shard and take it back."""
    model, expected = build(cell), build(cell).state_dict()
    for handle in reversed(shard_ours(model, cell)):
        handle.undo()
        handle.undo()
    found = model.state_dict()
    return list(found) == list(expected) and all(
        type(found[name]) is type(value) and torch.equal(local(found[name]), local(value))
        for name, value in expected.items()
    )


def gathered_reads_whole_values(cell: Cell) -> bool:
    """Read every parameter inside ``gathered``."""
    model, expected = build(cell), build(cell)
    shard_ours(model, cell)
    with gathered(model):
        return all(
            torch.equal(local(_attribute(model, name)), local(value))
            for name, value in expected.named_parameters()
        )


def _attribute(model: nn.Module, name: str) -> torch.Tensor:
    owner, _, attribute = name.rpartition(".")
    found: torch.Tensor = getattr(model.get_submodule(owner), attribute)
    return found


def captured_differs_from_eager(cell: Cell) -> list[str]:
    """Loss and gradients that differ in some bit, on a batch that was not traced.

    Then again after a parameter was replaced by another object.
    """
    model = build(cell)
    shard_ours(model, cell)

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        loss = loss_of(model, tokens, labels)
        return loss, torch.autograd.grad(loss, list(model.parameters()))

    bound = trace_step(step, module=model)(*batch(cell, 0)).bind(model)
    names = ["loss", *(name for name, _ in model.named_parameters())]
    differ: list[str] = []
    for round_name in ("at first", "replaced"):
        if round_name == "replaced":
            norm = model.get_submodule("blocks.0.norm")
            norm.weight = nn.Parameter(norm.weight.detach() * 1.5)
        captured, eager = bound(*batch(cell, 1)), step(*batch(cell, 1))
        pairs = zip(names, [captured[0], *captured[1]], [eager[0], *eager[1]], strict=True)
        differ += [
            f"{name} {round_name}"
            for name, a, b in pairs
            if type(a) is not type(b) or not torch.equal(local(a), local(b))
        ]
    return differ


def copies_compute_as_the_original(cell: Cell) -> list[bool]:
    """A deep copy, and a copy by pickle, of a sharded model."""
    model = build(cell)
    shard_ours(model, cell)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    expected = loss_of(model, *batch(cell, 0))
    copies = [copy.deepcopy(model), torch.load(file, weights_only=False)]
    return [torch.equal(loss_of(copied, *batch(cell, 0)), expected) for copied in copies]


def save_checkpoint(cell: Cell, folder: str) -> None:
    """Save the model of ``build``."""
    model = build(cell)
    shard_ours(model, cell)
    dcp.save(model.state_dict(), checkpoint_id=folder)


def load_checkpoint(cell: Cell, folder: str) -> list[str]:
    """Names whose values are not those of ``build`` after loading over zeros."""
    model = build(cell)
    expected = build(cell).state_dict()
    handles = shard_ours(model, cell)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    dcp.load(model.state_dict(), checkpoint_id=folder)
    for handle in reversed(handles):
        handle.undo()
    found = model.state_dict()
    return [n for n, value in expected.items() if not torch.equal(local(found[n]), local(value))]
