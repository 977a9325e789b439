"""Data parallelism as traceable collectives on parameters."""

from gt_trace.fsdp.simple_fsdp import (
    MixedPrecision,
    ShardedModel,
    ShardingError,
    ShardingMode,
    gathered,
    shard,
)

__all__ = ["MixedPrecision", "ShardedModel", "ShardingError", "ShardingMode", "gathered", "shard"]
