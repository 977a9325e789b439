"""What a device sets otherwise than ``gt_config.CompileConfig``, for whatever model.

A configuration is published for GPUs, with the activation checkpointing by which it fits there. On
CPUs everything runs as captured and keeps the bits of an eager run, so there is nothing to set.
"""

from __future__ import annotations

from dataclasses import replace

from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from gt_config.compile_config import MemoryPolicy
from gt_trainer.compile_options import TrainerCompileConfig
from gt_trainer.device import intended_device_type

_POLICIES: dict[type, MemoryPolicy] = {
    SelectiveAC.Config: "selective",
    FullAC.Config: "full_recompute",
}


def default_options(
    activation_checkpoint: object, *, memory_policy: MemoryPolicy | None = None
) -> TrainerCompileConfig:
    """The options of a run for which nobody sets any.

    On GPUs: the memory policy nearest to the published checkpointing (selective keeps all
    products), Inductor for what memory bounds, CUDA graphs. ``preflight.settled_defaults`` takes
    back what does not go with the options that a user sets.

    Args:
        activation_checkpoint: torchtitan's, as the configuration is published; None for none.
        memory_policy: on GPUs, where what is published does not fit at the intended size.
    """
    if intended_device_type() == "cpu":
        return TrainerCompileConfig()
    return replace(
        TrainerCompileConfig(),
        memory_policy=memory_policy or _POLICIES.get(type(activation_checkpoint), "save_all"),
        inductor_compilation="regional",
        cuda_graphs=True,
    )
