"""What the workers of ``test_models_initialization.py`` run: a placed, initialized model."""

from __future__ import annotations

import dataclasses
import importlib

import torch
from torch import distributed as dist
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend

from gt_config import AutoParallelConfig

NUM_LAYERS = 2


def initial_weights(
    module: str, name: str, degrees: dict[str, int], placement_folder: str | None = None
) -> dict[str, torch.Tensor]:
    """Every parameter, whole, of a debug model placed on the workers and drawn from seed 0.

    By a solver if it is given a folder, under a budget that makes it shard parameters.
    """
    config = getattr(importlib.import_module(f"gt_trainer.models.{module}"), name)()
    config.parallelism = dataclasses.replace(config.parallelism, **degrees)
    if placement_folder is not None:
        solver = AutoParallelConfig(memory_budget_gib=0.04, relative_gap=0.05)
        config.compile = dataclasses.replace(
            config.compile, autoparallel=True, autoparallel_solver=solver
        )
        config.training.seq_len, config.training.local_batch_size = 32, 2
    specification = config.model_spec
    specification.model.layers = specification.model.layers[:NUM_LAYERS]
    specification.model.update_from_config(config=config)
    set_spmd_backend("partial_dtensor")
    with torch.device("meta"):
        model = specification.model.build()
    model = specification.parallelize_fn(
        model,
        parallel_dims=ParallelDims.from_config(config.parallelism, dist.get_world_size()),
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder=placement_folder or "",
    )
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}
