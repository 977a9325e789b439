"""What of a model, its masks and the options is at odds with ranks that share a sequence.

That each rank gets as many tokens, gt-config judges (``gt_config/_rules/mesh.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.models.common.decoder import Decoder

from gt_config import Topology, Violation
from gt_trainer.context_parallel.token_order import ROUND_ROBIN_BLOCK, LoadBalancer
from gt_trainer.decoder.own_masks import makes_own_masks

_DEGREE = "--parallelism.context_parallel_degree"
_BALANCER = "--parallelism.context_parallel_load_balancer"
_MASK_KEY = "--parallelism.context_parallel_ptrr_mask_key"
_LEAVE_OUT = "leave the flag out"


def context_parallel_violations(config: Any, topology: Topology) -> Iterator[Violation]:
    """Everything that is wrong with the options of context parallelism, set or not.

    Args:
        config: a ``GraphTrainer.Config``.
        topology: extents of the run.
    """
    parallelism = config.parallelism
    balancer = parallelism.context_parallel_load_balancer
    mask_key = parallelism.context_parallel_ptrr_mask_key
    if balancer is not None and balancer not in get_args(LoadBalancer):
        yield Violation(
            flag=_BALANCER, value=balancer, allowed="None, 'headtail' or 'ptrr'", fix="use one"
        )
    elif topology.cp == 1 and balancer != "headtail":
        yield Violation(
            flag=_BALANCER,
            value=balancer,
            allowed=f"its default 'headtail' with {_DEGREE} 1: nothing is divided",
            fix=_LEAVE_OUT,
        )
    if mask_key is not None:
        yield Violation(
            flag=_MASK_KEY,
            value=mask_key,
            allowed="None: the layers of our models have one mask",
            fix=_LEAVE_OUT,
        )
    model = config.model_spec.model if config.model_spec is not None else None
    if topology.cp == 1 or not isinstance(model, Decoder.Config):
        return
    if makes_own_masks(model):
        yield Violation(
            flag=_DEGREE,
            value=topology.cp,
            allowed="1 for a model whose layers have masks of their own: it makes them for whole "
            "sequences in their order, and ranks that share one have it in another",
            fix=_LEAVE_OUT,
        )
    inner = getattr(model.first_attention, "inner_attention", None)
    if isinstance(inner, VarlenAttention.Config):
        yield Violation(
            flag=_DEGREE,
            value=topology.cp,
            allowed="1 for a model that attends with VarlenAttention: it finds documents by where "
            "they begin and end, and has as many queries of each as keys",
            fix=f"{_LEAVE_OUT}, or choose a --config that attends with FlexAttention",
        )
    block = _block_of_queries(inner, balancer)
    if block is not None and topology.seq_len % (topology.cp * block):
        multiple = topology.cp * block
        yield Violation(
            flag="--training.seq_len",
            value=topology.seq_len,
            allowed=f"a multiple of {multiple} ({_DEGREE} {topology.cp} * {block} queries, a block "
            f"of {'the mask' if isinstance(inner, FlexAttention.Config) else balancer})",
            fix=f"use {-(-topology.seq_len // multiple) * multiple}, or fewer ranks",
        )


def _block_of_queries(inner: object, balancer: str | None) -> int | None:
    """Queries that are not divided; None if any may be."""
    if isinstance(inner, FlexAttention.Config):
        block = inner.block_size
        return block if isinstance(block, int) else block[0]
    return ROUND_ROBIN_BLOCK if balancer == "ptrr" else None
