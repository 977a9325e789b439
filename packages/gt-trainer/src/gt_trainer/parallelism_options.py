"""The ``--parallelism.*`` options of ``gt-train``: torchtitan's, and one that it has not.

A flag stands in the group where a reader of torchtitan looks for its neighbours, so that this is a
subclass of torchtitan's dataclass, and no option of ``--compile``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from torchtitan.config import ParallelismConfig

PipelineBalance = Literal["layers", "simulated", "planned"]
"""By what a model's layers are divided among the stages of a pipeline."""


@dataclass(kw_only=True, slots=True)
class TrainerParallelismConfig(ParallelismConfig):
    """torchtitan's ``ParallelismConfig`` and what balances the stages of a pipeline."""

    pipeline_parallel_balance: PipelineBalance = "layers"
    """
    How layers are divided among the stages of a pipeline.

    - "layers": as many on each stage, where what stands before the first layer, and after the
      last, counts as so many as pipeline_parallel_first_stage_less_layers and
      pipeline_parallel_last_stage_less_layers say.
    - "simulated": such that the simulated schedule takes least. The embedding, one layer of each
      kind, and the output with the loss are captured and priced on rank 0 before training.
    - "planned": likewise, of modules that a solver has placed (--compile.autoparallel).
    """


def with_own_options(parallelism: ParallelismConfig) -> TrainerParallelismConfig:
    """The same options, ours included: at their defaults if torchtitan's alone were given."""
    if isinstance(parallelism, TrainerParallelismConfig):
        return parallelism
    given = {
        field.name: getattr(parallelism, field.name) for field in dataclasses.fields(parallelism)
    }
    return TrainerParallelismConfig(**given)


def balance_of(parallelism: ParallelismConfig) -> PipelineBalance:
    """By what stages are balanced; torchtitan's own configuration knows layers alone."""
    if isinstance(parallelism, TrainerParallelismConfig):
        return parallelism.pipeline_parallel_balance
    return "layers"
