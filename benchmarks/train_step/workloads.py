"""The two workloads, and every setting that all contestants share.

Starting point is torchtitan's published debug configuration, which each contestant brings in its
own form; ``shared_settings`` then makes them alike. Nothing here imports torch, so that the process
which measures starts at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

__all__ = ["WORKLOADS", "Workload", "shared_settings"]

_SEED = 42
_LEARNING_RATE = 2e-4
"""Small enough that rounding does not grow: at ten times this, deepseek_v3's losses are 10 % apart
after eight steps between any two of the contestants, torchtitan's own among them."""

_STEPS = 1000  # more than any run makes: the parent process says when to stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model, its placement on 4 ranks, and the batch of each."""

    name: str
    module: str
    """Model family: ``torchtitan.models.<module>``, ``gt_trainer.models.<module>``."""
    config: str
    """Function in that family's configurations."""
    degrees: Mapping[str, int]
    """Fields of torchtitan's ``ParallelismConfig``."""
    seq_len: int
    local_batch_size: int = 2


WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        "llama3": Workload(
            name="llama3_debugmodel fsdp2 tp2, 4 gloo ranks, seq 256, local batch 2",
            module="llama3",
            config="llama3_debugmodel",
            degrees={"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2},
            seq_len=256,
        ),
        "deepseek_v3": Workload(
            name="deepseek_v3_debugmodel fsdp4 ep2, 4 gloo ranks, seq 128, local batch 2",
            module="deepseek_v3",
            config="deepseek_v3_debugmodel",
            degrees={"data_parallel_shard_degree": 4, "expert_parallel_degree": 2},
            seq_len=128,
        ),
    }
)


def shared_settings(workload: Workload) -> dict[str, Any]:
    """Fields of torchtitan's ``Trainer.Config`` that are the same for all contestants.

    Float32, AdamW at a constant rate after two steps, a fixed seed, the same text; no activation
    checkpointing, checkpoints or validation. Imports torchtitan.
    """
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.components.validate import Validator
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.config.configs import DebugConfig

    from gt_trainer.data.shipped_tokenizer import shipped_tokenizer_path
    from gt_trainer.data.text_dataloader import StdlibTextDataLoader

    degrees: dict[str, Any] = dict(workload.degrees)
    return {
        "hf_assets_path": str(shipped_tokenizer_path()),
        "dataloader": StdlibTextDataLoader.Config(),
        "optimizer": default_adamw(lr=_LEARNING_RATE),
        "lr_scheduler": LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.0),
        "training": TrainingConfig(
            local_batch_size=workload.local_batch_size,
            seq_len=workload.seq_len,
            steps=_STEPS,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        "parallelism": ParallelismConfig(spmd_backend="partial_dtensor", **degrees),
        "checkpoint": CheckpointManager.Config(enable=False),
        "validator": Validator.Config(enable=False),
        "activation_checkpoint": None,
        "debug": DebugConfig(seed=_SEED),
    }
