"""Small objects from every rank to every rank.

``torch.distributed.all_gather_object`` does the same and needs NumPy, which torch does not require.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist


def gather_objects(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """What every rank of a gloo group gave, by its rank in the group. Collective over the group.

    It is pickled, and should be small: all ranks' stand on every rank.
    """
    data = bytearray(pickle.dumps(mine))
    sent = torch.frombuffer(data, dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    group.allgather([sizes], [torch.tensor([len(data)])]).wait()
    largest = int(max(sizes))
    padded = torch.zeros(largest, dtype=torch.uint8)
    padded[: len(data)] = sent
    received = [torch.empty_like(padded) for _ in sizes]
    group.allgather([received], [padded]).wait()
    return [
        pickle.loads(bytes(each[: int(size)].tolist()))
        for each, size in zip(received, sizes, strict=True)
    ]
