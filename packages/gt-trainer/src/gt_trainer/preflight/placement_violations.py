"""What our placement of a model, and that by a solver, cannot be combined with, each by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.models.common.decoder import Decoder

from gt_config import Topology, Violation
from gt_trainer.context_parallel.token_order import ROUND_ROBIN_BLOCK, LoadBalancer
from gt_trainer.decoder.attention import attends_with_flex_attention
from gt_trainer.decoder.expert_layers import expert_layers
from gt_trainer.decoder.own_masks import makes_own_masks
from gt_trainer.device import intended_device_type
from gt_trainer.parallelism_options import balance_of


def unsupported_placement(
    parallelism: ParallelismConfig, training: TrainingConfig, *, activation_checkpoint: object
) -> Iterator[Violation]:
    """Every option that ``gt_trainer.placement.parallelize`` would not honour."""
    if parallelism.spmd_backend != "partial_dtensor":
        yield Violation(
            flag="--parallelism.spmd_backend",
            value=parallelism.spmd_backend,
            allowed="'partial_dtensor', whose collectives a capture records",
        )
    for flag, is_set in (
        ("--parallelism.enable_fsdp_symm_mem", parallelism.enable_fsdp_symm_mem),
        ("--training.enable_cpu_offload", training.enable_cpu_offload),
    ):
        if is_set:
            yield Violation(
                flag=flag,
                value=True,
                allowed="False: it configures torch's FSDP2, which is not used here",
            )
    if activation_checkpoint is not None:
        yield Violation(
            flag="activation-checkpoint",
            value=type(activation_checkpoint).__qualname__,
            allowed="none: recomputation is decided on the captured graph",
            fix="choose activation-checkpoint:none, and see --compile.memory_policy",
        )


def autoparallel_violations(config: Any, topology: Topology) -> Iterator[Violation]:
    """What is wrong with a run if a solver places its model; nothing if none does.

    Options that gt-config knows are judged there; this is about the trainer and its models.

    Args:
        config: a ``GraphTrainer.Config``.
        topology: extents of the run.
    """
    if not config.compile.autoparallel:
        return
    if topology.world == topology.pp:
        a_stage = " a stage" if topology.pp > 1 else ""
        yield Violation(
            flag="--compile.autoparallel",
            value=True,
            allowed=f"False on one rank{a_stage}: there is nothing to place",
            fix="leave the flag out, or use more processes",
        )
    if topology.pp > 1 and balance_of(config.parallelism) == "simulated":
        yield Violation(
            flag="--parallelism.pipeline_parallel_balance",
            value="simulated",
            allowed="'layers' or 'planned' with --compile.autoparallel: modules are priced as they "
            "are placed by hand",
            fix="use planned",
        )
    model = config.model_spec.model if config.model_spec is not None else None
    if not isinstance(model, Decoder.Config):
        return
    has_experts = bool(expert_layers(model))
    experts = config.compile.autoparallel_solver.experts
    if not has_experts and experts != "any":
        yield Violation(
            flag="--compile.autoparallel_solver.experts",
            value=experts,
            allowed="'any' for a model without experts",
        )
    if topology.ep > 1 and topology.tp > 1:
        yield from _experts_over_tensor_parallel_ranks(topology)
    inner = getattr(model.first_attention, "inner_attention", None)
    if isinstance(inner, VarlenAttention.Config):
        yield Violation(
            flag="--compile.autoparallel",
            value=True,
            allowed="False for a model that attends with VarlenAttention, which has no placement "
            "rule",
            fix="leave the flag out, or choose a --config that attends with FlexAttention",
        )
    if attends_with_flex_attention(model) and intended_device_type() != "cpu":
        yield from _eager_flex_attention(config)


def _experts_over_tensor_parallel_ranks(topology: Topology) -> Iterator[Violation]:
    """Experts are distributed over the ranks of tensor parallelism first, each with its tokens."""
    tp, ep = topology.tp, topology.ep
    if tp % ep and ep % tp:
        yield Violation(
            flag="--parallelism.expert_parallel_degree",
            value=ep,
            allowed=f"a divisor or a multiple of --parallelism.tensor_parallel_degree {tp} with "
            "--compile.autoparallel: else no axes of a mesh are the ranks of either",
            fix=f"use {tp}, or leave one of the two out",
        )
    if topology.seq_len % tp:
        yield Violation(
            flag="--training.seq_len",
            value=topology.seq_len,
            allowed=f"a multiple of --parallelism.tensor_parallel_degree {tp} with expert "
            "parallelism and --compile.autoparallel: each rank routes its part of the sequence",
            fix=f"use {topology.seq_len // tp * tp or tp}",
        )


def _eager_flex_attention(config: Any) -> Iterator[Violation]:
    """A placed model has FlexAttention's operator, which only a captured step compiles."""
    why = "a placed model's FlexAttention, run eagerly, makes all scores of all tokens"
    if config.compile.mode == "none":
        yield Violation(
            flag="--compile.mode",
            value="none",
            allowed=f"a captured mode with --compile.autoparallel: {why}",
        )
    if config.validator.enable:
        yield Violation(
            flag="--validator.enable",
            value=True,
            allowed=f"False with --compile.autoparallel, since validation is eager: {why}",
        )


# What of a model, its masks and the options is at odds with ranks that share a sequence.
#
# That each rank gets as many tokens, gt-config judges (``gt_config/_rules/mesh.py``).
_DEGREE = "--parallelism.context_parallel_degree"
_BALANCER = "--parallelism.context_parallel_load_balancer"
_MASK_KEY = "--parallelism.context_parallel_ptrr_mask_key"


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
        )
    if mask_key is not None:
        yield Violation(
            flag=_MASK_KEY,
            value=mask_key,
            allowed="None: the layers of our models have one mask",
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
        )
    inner = getattr(model.first_attention, "inner_attention", None)
    if isinstance(inner, VarlenAttention.Config):
        yield Violation(
            flag=_DEGREE,
            value=topology.cp,
            allowed="1 for a model that attends with VarlenAttention: it finds documents by where "
            "they begin and end, and has as many queries of each as keys",
            fix="leave the flag out, or choose a --config that attends with FlexAttention",
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
