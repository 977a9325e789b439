"""What a run whose model a solver places cannot be combined with, each by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.models.common.decoder import Decoder

from gt_config import Topology, Violation

_LEAVE_OUT = "leave the flag out"


def autoparallel_violations(config: Any, topology: Topology) -> Iterator[Violation]:
    """What is wrong with a run if a solver places its model; nothing if none does.

    Options that gt-config knows are judged there; this is about the trainer and its models.

    Args:
        config: a ``GraphTrainer.Config``.
        topology: extents of the run.
    """
    if not config.compile.autoparallel:
        return
    if topology.world == 1:
        yield Violation(
            flag="--compile.autoparallel",
            value=True,
            allowed="False on one rank: there is nothing to place",
            fix=f"{_LEAVE_OUT}, or use more processes",
        )
    model = config.model_spec.model if config.model_spec is not None else None
    if not isinstance(model, Decoder.Config):
        return
    has_experts = any(getattr(layer, "moe", None) is not None for layer in model.layers)
    experts = config.compile.autoparallel_solver.experts
    if not has_experts and experts != "any":
        yield Violation(
            flag="--compile.autoparallel_solver.experts",
            value=experts,
            allowed="'any' for a model without experts",
            fix=_LEAVE_OUT,
        )
    if has_experts and topology.tp > 1:
        yield Violation(
            flag="--parallelism.tensor_parallel_degree",
            value=topology.tp,
            allowed="1 for a model with experts that --compile.autoparallel places: the counts "
            "that balance its routing are summed over data-parallel ranks only",
            fix="leave the flag out; --parallelism.expert_parallel_degree gives experts an axis",
        )
    inner = getattr(model.first_attention, "inner_attention", None)
    if isinstance(inner, (FlexAttention.Config, VarlenAttention.Config)):
        name = type(inner).__qualname__.removesuffix(".Config")
        yield Violation(
            flag="--compile.autoparallel",
            value=True,
            allowed=f"False for a model that attends with {name}, which has no placement rule",
            fix=f"{_LEAVE_OUT}, or choose a --config with scaled dot product attention",
        )
