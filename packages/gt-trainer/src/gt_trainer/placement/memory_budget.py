"""How much memory a solver's plan may take on each rank: what the user says, or what there is."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch
from torchtitan.config import TORCH_DTYPE_MAP, TrainingConfig
from torchtitan.tools import utils as titan_utils

from gt_autoparallel import MeshShape, device_budget_bytes
from gt_config import AutoParallelConfig
from gt_trainer.device import machine_memory_bytes
from gt_trainer.placement.planned_loss import num_chunks
from gt_trainer.placement.planned_machine import planned_machine
from gt_trainer.placement.planned_mesh import local_token_shape, num_batch_shards

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """A limit, and where it comes from."""

    num_bytes: int
    """On each rank."""

    source: str

    def __str__(self) -> str:
        return f"a budget of {self.num_bytes / _GIB:.2f} GiB on each rank: {self.source}"


def asked_budget_bytes(solver: AutoParallelConfig) -> int | None:
    """What ``--compile.autoparallel_solver.memory_budget_gib`` says; None if nothing."""
    gib = solver.memory_budget_gib
    return None if gib is None else int(gib * _GIB)


def memory_budget(solver: AutoParallelConfig) -> MemoryBudget:
    """What ``--compile.autoparallel_solver.memory_budget_gib`` says; else nine tenths of what is.

    That is the device's memory. Of a dry run it is that of the machine that is simulated, and of a
    run on a CPU the rank's part of the machine's, which the ranks there share.
    """
    asked = asked_budget_bytes(solver)
    if asked is not None:
        return MemoryBudget(
            num_bytes=asked, source="--compile.autoparallel_solver.memory_budget_gib"
        )
    machine = planned_machine()
    if machine.is_simulated:
        hardware = machine.described()
        capacity = hardware.hbm_capacity_bytes
        source = f"the {capacity / _GIB:.2f} GiB of {hardware.name}"
    elif titan_utils.device_type != "cpu":
        capacity = int(titan_utils.device_module.get_device_properties().total_memory)
        source = f"the {capacity / _GIB:.2f} GiB of the device"
    else:
        num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        capacity = machine_memory_bytes() // num_ranks
        source = f"a rank's part of this machine's {capacity * num_ranks / _GIB:.2f} GiB"
    return MemoryBudget(num_bytes=device_budget_bytes(capacity), source=f"nine tenths of {source}")


def adds_up_gradients(mesh: MeshShape, training: TrainingConfig) -> bool:
    """Whether a step has several microbatches, of which each is one run of the planned model.

    Args:
        mesh: that is planned.
        training: gives the samples of a rank's microbatch, and of a step.
    """
    return training.global_batch_size > training.local_batch_size * num_batch_shards(mesh)


def loss_bytes(
    mesh: MeshShape, training: TrainingConfig, *, num_samples: int, vocab_size: int
) -> int:
    """What a rank holds for the loss when most is alive, logits included.

    That is what a captured step has for torchtitan's ``CrossEntropyLoss`` under ``planned_loss``,
    at the first chunk or at the last. At the first: the logits, a copy of each chunk, and its own
    in float32. At the last: the gradient of all logits; and of its chunk a copy, the float32
    logits, log-probabilities and their gradient, and the gradient once more.

    Args:
        mesh: that is planned.
        training: gives the sequence length, and the dtype of logits.
        num_samples: of one rank.
        vocab_size: of the model.
    """
    shape = local_token_shape(mesh, training.seq_len, num_samples=num_samples, width=vocab_size)
    dtype = TORCH_DTYPE_MAP[training.mixed_precision_param]
    chunks, wide = num_chunks(shape[1]), torch.float32.itemsize
    first = (2 * chunks - 1) * dtype.itemsize + wide
    last = (chunks + 2) * dtype.itemsize + 3 * wide
    return math.prod(shape) * max(first, last) // chunks
