"""Data parallelism as traceable collectives on parameters."""

from gt_trace.fsdp.simple_fsdp import (
    MixedPrecision,
    Mode,
    ShardedModel,
    ShardingError,
    gathered,
    shard,
)

__all__ = ["MixedPrecision", "Mode", "ShardedModel", "ShardingError", "gathered", "shard"]
