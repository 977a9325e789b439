"""Attention of each rank's queries to the keys and values of all ranks that share the sequence.

torchtitan wraps the forward of each layer's inner attention for that, and so do we, at the same
place (``torchtitan/distributed/context_parallel/api.py``): inside of what tensor parallelism puts
around it, so that a rank gathers its own heads. torchtitan's operator hides its collectives from a
graph, and its scaled dot product takes no mask; ours are in the graph, for both kinds of attention.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.models.common.attention import BaseAttention

from gt_trace.context_parallel import SequenceAxis, gather_sequence


def attend_to_all_ranks(model: nn.Module, mesh: DeviceMesh) -> int:
    """Let every layer's inner attention gather keys and values over ``mesh`` before it attends.

    Before ``Module.parallelize``, which wraps what it finds. A forward takes queries, keys and
    values (B, l, heads, width) of this rank's tokens, and its mask is of this rank's tokens to all.

    Args:
        model: a torchtitan decoder, or a stage of one; changed in place.
        mesh: the one axis of the ranks that share a sequence.

    Returns:
        How many layers attend so.
    """
    axis = SequenceAxis.of(mesh)
    inner: list[Any] = [m.inner_attention for m in model.modules() if isinstance(m, BaseAttention)]
    for attention in inner:
        attention.forward = _gathering(attention.forward, axis)
    return len(inner)


def _gathering(attend: Any, axis: SequenceAxis) -> Any:
    @functools.wraps(attend)
    def forward(
        q_BLNH: torch.Tensor, k_BLNH: torch.Tensor, v_BLNH: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        keys, values = gather_sequence((k_BLNH, v_BLNH), axis)
        attended: torch.Tensor = attend(q_BLNH, keys, values, **options)
        return attended

    return forward
