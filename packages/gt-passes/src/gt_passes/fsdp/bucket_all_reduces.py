"""Reduce the gradients of a transformer block at once where shards are replicated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from gt_config.graph_kinds import MeshAxis
from gt_passes._torch_internals import OpOverload
from gt_passes.fsdp.bucket_reductions import BucketReductions
from gt_passes.registry import register_pass


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class BucketAllReduces(BucketReductions):
    """Replace a block's all-reduces of gradients (hybrid sharding, DDP) by one, at the last.

    Runs after ``bucket-reduce-scatters``, which brings the shards of a block together.

    *Before*::

        r1 = all_reduce(a, "sum", "replicate");  s1 = wait_tensor(r1)    # a: [2, 4]
        ...
        r2 = all_reduce(b, "sum", "replicate");  s2 = wait_tensor(r2)    # b: [4]

    *After*::

        ...
        r = all_reduce(pack_bucket([a, b], 1, float32), "sum", "replicate")
        p = unpack_bucket(wait_tensor(r), 1, [8, 4])
        s1 = view(p[0], [2, 4]);  s2 = p[1]

    *Refuses* and *preserves numerics* as ``bucket-reduce-scatters``.
    """

    name: ClassVar[str] = "bucket-all-reduces"
    mesh_axes: ClassVar[frozenset[MeshAxis]] = frozenset({"dp_replicate"})
    target: ClassVar[OpOverload] = torch.ops._c10d_functional.all_reduce.default
