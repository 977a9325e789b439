"""What a model of transformers' cannot be combined with, each by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gt_config import Topology, Violation
from gt_trainer.models.hugging_face.causal_model import CausalModel

_LEAVE_OUT = "leave the flag out"
_ALLOWED = "with a model of transformers'"


def hugging_face_violations(config: Any, topology: Topology) -> Iterator[Violation]:
    """Yield what is wrong with a run of such a model; nothing for another one.

    Args:
        config: a ``GraphTrainer.Config``.
        topology: extents of the run.
    """
    model = config.model_spec.model if config.model_spec is not None else None
    if not isinstance(model, CausalModel.Config):
        return
    for axis, extent, reason in (
        ("tensor_parallel", topology.tp, "it says of no weight how ranks would share it"),
        ("context_parallel", topology.cp, "its attention is its own, and knows whole sequences"),
        ("expert_parallel", topology.ep, "no experts of it are known"),
        ("pipeline_parallel", topology.pp, "its forward is not cut into stages here"),
    ):
        if extent > 1:
            yield Violation(
                flag=f"--parallelism.{axis}_degree",
                value=extent,
                allowed=f"1 {_ALLOWED}: {reason}",
                fix="use data_parallel_shard_degree or data_parallel_replicate_degree",
            )
    if config.compile.autoparallel:
        yield Violation(
            flag="--compile.autoparallel",
            value=True,
            allowed=f"False {_ALLOWED}: the solver's parts are those of torchtitan's decoders",
            fix=_LEAVE_OUT,
        )
    if config.quantization:
        yield Violation(
            flag="--quantization",
            value="given",
            allowed=f"none {_ALLOWED}: its layers are none of torchtitan's, which are quantized",
            fix=_LEAVE_OUT,
        )
    if config.training.seq_len > model.max_seq_len:
        yield Violation(
            flag="--training.seq_len",
            value=config.training.seq_len,
            allowed=f"at most {model.max_seq_len}, the model's max_position_embeddings",
            fix=f"use {model.max_seq_len} or less",
        )
