"""The extents that validation needs to know about a run: the mesh and the batch, as integers.

``Topology`` stands between the trainer, which knows a device mesh and a data loader, and the rules
of this package, which must run before either exists. The degrees follow torchtitan 0.3.0
(``torchtitan/distributed/parallel_dims.py``): expert parallelism is no axis of the world of its own
but borrows the ranks of ``dp_shard * cp * tp``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

MeshAxis = Literal["dp_replicate", "dp_shard", "cp", "tp", "ep"]
"""Axes of the mesh whose ranks a pass's collectives connect, as ``Topology`` names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Degrees of the mesh and extents of the batch; plain integers, nothing resolved from devices.

    The constructor accepts any integers: whether they fit together is for ``validate`` to say, all
    at once and together with the configuration.
    """

    world: int
    """Number of ranks."""

    dp_replicate: int = 1
    """Data parallelism that keeps a whole copy of the weights."""

    dp_shard: int = 1
    """Data parallelism that shards the weights. Already resolved: "the rest" (-1) is refused."""

    cp: int = 1
    """Context parallelism: ranks that share one sequence."""

    tp: int = 1
    """Tensor parallelism."""

    ep: int = 1
    """Expert parallelism; it divides ``dp_shard * cp * tp`` and multiplies nothing."""

    pp: int = 1
    """Pipeline parallelism: ranks, not stages."""

    batch_size: int
    """Samples in one forward pass on one rank, before any split into microbatches."""

    microbatch_size: int = 1
    """Samples in one forward pass of a pipeline's stage; without a pipeline it means nothing."""

    seq_len: int
    """Tokens in one sample, before any sharding."""

    gradient_accumulation_steps: int = 1
    """Forward and backward passes for one optimizer step."""

    sequence_parallel: bool = True
    """Whether tensor parallelism also shards the sequence between its regions."""


TOPOLOGY_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "world": "world size",
        "dp_replicate": "--parallelism.data_parallel_replicate_degree",
        "dp_shard": "--parallelism.data_parallel_shard_degree",
        "cp": "--parallelism.context_parallel_degree",
        "tp": "--parallelism.tensor_parallel_degree",
        "ep": "--parallelism.expert_parallel_degree",
        "pp": "--parallelism.pipeline_parallel_degree",
        "batch_size": "--training.local_batch_size",
        "microbatch_size": "--parallelism.pipeline_parallel_microbatch_size",
        "seq_len": "--training.seq_len",
        "gradient_accumulation_steps": "gradient accumulation steps",
        "sequence_parallel": "--parallelism.enable_sequence_parallel",
    }
)
"""The flag by which a user sets each field of ``Topology``; errors name these."""
