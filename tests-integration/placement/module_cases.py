"""On each of four ranks: a module that a solver placed for a plan, beside the whole one."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from gt_autoparallel import apply_plan
from gt_passes.simulation import h100_sxm
from gt_trainer.planning.module_recipes import mesh_of
from gt_trainer.planning.placed_module import ModuleWithLoss, meta_inputs, placement_of
from gt_trainer.planning.run_recipe import RunRecipe

WIDTH = 8
RECIPE = RunRecipe(dp_shard=2, tp=2, microbatch=4, global_batch=8, memory_policy="save_all")


def loss(model: nn.Module, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(hidden), wanted)


def with_loss() -> ModuleWithLoss:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    return ModuleWithLoss(model, loss)


def placed_beside_whole() -> tuple[list[str], dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """How parameters are placed; of the loss and each gradient, what both modules have."""
    whole, placed = with_loss(), with_loss()
    batch = torch.randn(2, RECIPE.global_batch, WIDTH).unbind()
    mesh = mesh_of(RECIPE, "cpu")
    mine = [each.chunk(RECIPE.dp_shard)[mesh.get_local_rank("data")] for each in batch]
    plan = placement_of(RECIPE, placed, meta_inputs(mine), h100_sxm(), mixed_precision=None)
    apply_plan(placed, plan, mesh)
    found = {"loss": (whole(*batch), placed(*mine))}
    for value in found["loss"]:
        value.backward()
    of_placed = dict(placed.named_parameters())
    for name, parameter in whole.named_parameters():
        gradient = of_placed[name].grad
        assert isinstance(gradient, DTensor)
        found[name] = parameter.grad, gradient.full_tensor()
    layouts = [str(each.placements) for each in of_placed.values()]
    return layouts, {
        name: (first.detach(), second.detach()) for name, (first, second) in found.items()
    }
