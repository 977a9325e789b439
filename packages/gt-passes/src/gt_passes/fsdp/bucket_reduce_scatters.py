"""Reduce and scatter the gradients of a transformer block at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from gt_config.graph_kinds import SHARD_AXES, MeshAxis
from gt_passes._torch_internals import OpOverload
from gt_passes.fsdp.bucket_reductions import BucketReductions
from gt_passes.registry import register_pass


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class BucketReduceScatters(BucketReductions):
    """Replace a block's FSDP reduce-scatters by one, at the place of the last.

    *Before*::

        c1 = _to_copy(a, dtype=float32)                                           # a: [16, 4]
        r1 = reduce_scatter_tensor(c1, "sum", 8, "fsdp");  s1 = wait_tensor(r1)
        ...
        c2 = _to_copy(b, dtype=float32)                                           # b: [32]
        r2 = reduce_scatter_tensor(c2, "sum", 8, "fsdp");  s2 = wait_tensor(r2)

    *After*::

        ...
        r = reduce_scatter_tensor(pack_bucket([a, b], 8, float32), "sum", 8, "fsdp")
        p = unpack_bucket(wait_tensor(r), 1, [8, 4])
        s1 = view(p[0], [2, 4]);  s2 = p[1]

    *Refuses*: collectives whose result is read by more than one wait, or whose sizes depend on
    data; to move a reduced gradient across a barrier, or past a write to its memory.

    *Preserves numerics*: yes. Every element is the sum of the same addends. A backend whose order
    of summation depends on an element's place in the message may round otherwise with more than
    two ranks; gloo is one (docs/decisions/0005-fsdp-bucketing.md).
    """

    name: ClassVar[str] = "bucket-reduce-scatters"
    mesh_axes: ClassVar[frozenset[MeshAxis]] = SHARD_AXES
    target: ClassVar[OpOverload] = torch.ops._c10d_functional.reduce_scatter_tensor.default
