"""What workers run to save a placed model and load it under other plans, or under none."""

from __future__ import annotations

import torch
import torch.distributed.checkpoint as dcp
from placed_model_cases import batch, decoder, local_arguments, mesh_2d
from random_plans import random_plan
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from gt_autoparallel.apply import apply_plan
from gt_autoparallel.graph.capture import capture_placement_graph
from gt_autoparallel.graph.layouts import MeshShape


def differences_after_loading(folder: str, seeds: tuple[int, int]) -> list[str]:
    """Save a model placed by one random plan, load it by another and whole; what differs."""
    mesh = mesh_2d()
    tokens, positions = batch()
    graph = capture_placement_graph(decoder(), (tokens,), {"positions": positions})
    first, second = (random_plan(decoder(), graph, MeshShape.of(mesh), seed=seed) for seed in seeds)
    saved = decoder()
    apply_plan(saved, first, mesh)
    optimizer = _adam(saved)
    tokens, positions = local_arguments(first, mesh)
    for _ in range(2):
        optimizer.zero_grad()
        sum(each.sum() for each in saved(tokens, positions=positions).values()).backward()
        optimizer.step()
    dcp.save(_state(saved, optimizer), checkpoint_id=folder)
    wanted = _whole_tensors(_state(saved, optimizer))

    placed = decoder()
    apply_plan(placed, second, mesh)
    problems = []
    for what, model in {"another plan": placed, "no plan": decoder()}.items():
        other = _adam(model)
        state = _state(model, other)
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            model, other, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        found = _whole_tensors(_state(model, other))
        if found.keys() != wanted.keys() or len(found) < 3 * len(list(model.parameters())):
            problems.append(f"{what}: {len(found)} tensors, {len(wanted)} saved")
        problems += [
            f"{what}: {name}" for name in wanted if not torch.equal(found[name], wanted[name])
        ]
    if first.parameter_layouts() == second.parameter_layouts():
        problems.append("the plans place parameters alike")
    return problems


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, object]]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def _whole_tensors(state: object, prefix: str = "") -> dict[str, torch.Tensor]:
    """Copies of all tensors in nested dictionaries, each whole, by their path."""
    if isinstance(state, dict):
        return {
            name: tensor
            for key, value in state.items()
            for name, tensor in _whole_tensors(value, f"{prefix}/{key}").items()
        }
    if isinstance(state, DTensor):
        return {prefix: state.full_tensor().clone()}
    return {prefix: state.clone()} if isinstance(state, torch.Tensor) else {}
