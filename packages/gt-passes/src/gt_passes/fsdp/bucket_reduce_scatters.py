"""Reduce and scatter the gradients of a transformer block at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from gt_passes._torch_internals import OpOverload
from gt_passes.fsdp.bucket_reductions import BucketReductions
from gt_passes.fsdp.fsdp_buckets import BucketNodes
from gt_passes.fsdp.fsdp_launches import FsdpLaunch
from gt_passes.registry import register_pass

_aten = torch.ops.aten


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class BucketReduceScatters(BucketReductions):
    """Replace a block's FSDP reduce-scatters by one, at the place of the last.

    *Before*::

        r1 = reduce_scatter_tensor(a, "sum", 8, "fsdp");  s1 = wait_tensor(r1)    # a: [16, 4]
        ...
        r2 = reduce_scatter_tensor(b, "sum", 8, "fsdp");  s2 = wait_tensor(r2)    # b: [32]

    *After*::

        ...
        rows = cat([view(a, [8, 8]), view(b, [8, 4])], 1)
        r = reduce_scatter_tensor(view(rows, [96]), "sum", 8, "fsdp")
        p = split_with_sizes_copy(wait_tensor(r), [8, 4])
        s1 = view(p[0], [2, 4]);  s2 = view(p[1], [4])

    *Refuses*: collectives whose result is read by more than one wait, or whose sizes depend on
    data; to move a reduced gradient across a barrier, or past a write to its memory.

    *Preserves numerics*: yes. Every element is the sum of the same addends. A backend whose order
    of summation depends on an element's place in the message may round otherwise with more than
    two ranks; gloo is one (docs/decisions/0005-fsdp-bucketing.md).
    """

    name: ClassVar[str] = "bucket-reduce-scatters"
    target: ClassVar[OpOverload] = torch.ops._c10d_functional.reduce_scatter_tensor.default

    def flat_input(self, nodes: BucketNodes, bucket: list[FsdpLaunch]) -> Node:
        """Row r holds what rank r gets of each member."""
        num_ranks = bucket[0].options[1]
        assert isinstance(num_ranks, int)  # by the schema of the operator
        rows = [
            nodes.view(member.input, [num_ranks, member.output_value.numel()], member)
            for member in bucket
        ]
        together = nodes.call(_aten.cat.default, rows, 1)
        numel = sum(member.input_value.numel() for member in bucket)
        return nodes.call(_aten.view.default, together, [numel])
