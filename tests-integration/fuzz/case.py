"""A case: a training step and a list of passes, as plain data.

Everything that decides what runs is in here, so that a case found at random can be stored, made
smaller, and replayed by a test.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

__all__ = ["Case", "PartSpec", "PassSpec", "Sharding", "StepSpec"]

Sharding = Literal["none", "replicate", "shard", "hybrid_shard", "shard_beside_tensor"]
"""How parameters are stored. The last two need 4 ranks, as two mesh axes of 2: hybrid_shard shards
over the second axis and replicates over the first; shard_beside_tensor shards over the first and
leaves the second to the layers' own collectives. Elsewhere both share one group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSpec:
    """One layer of a block: its kind, and its options."""

    kind: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpec:
    """A training step."""

    seed: int
    """Of the weights, the data, and the random operators."""

    sharding: Sharding = "shard"
    param_dtype: Literal["bfloat16"] | None = None
    reduction: Literal["avg", "sum"] = "avg"
    dim: int = 4
    """Features; odd ones are padded when sharded."""

    vocabulary: int = 8
    tied: bool = False
    """The output projection uses the weight of the embedding."""

    num_microbatches: int = 1
    share_gathered: bool = False
    """Microbatches read parameters that were gathered once (``gt_trace.fsdp.gathered``)."""

    optimizer: bool = False
    """The step updates the parameters (SGD with momentum) instead of returning gradients."""

    log_metric: bool = False
    """The loss is also reduced over ranks and returned."""

    blocks: tuple[tuple[PartSpec, ...], ...] = ()

    @property
    def num_ranks(self) -> int:
        """Size of the world."""
        return 4 if self.sharding in ("hybrid_shard", "shard_beside_tensor") else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSpec:
    """A pass by its registered name, with options that differ from their defaults or not."""

    name: str
    module: str = "gt_passes"
    """Importing it registers the pass."""

    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A step, and the passes to run on its graph."""

    step: StepSpec
    passes: tuple[PassSpec, ...]

    def to_json(self) -> str:
        """The case as JSON text, the same for equal cases."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The case that ``to_json`` wrote."""
        record = json.loads(text)
        step = record["step"]
        step["blocks"] = tuple(
            tuple(PartSpec(**part) for part in block) for block in step["blocks"]
        )
        return cls(
            step=StepSpec(**step),
            passes=tuple(PassSpec(**graph_pass) for graph_pass in record["passes"]),
        )

    def describe(self) -> str:
        """The case in a line or two, for people."""
        blocks = " | ".join("+".join(part.kind for part in block) for block in self.step.blocks)
        passes = ", ".join(_call(graph_pass) for graph_pass in self.passes)
        flags = [name for name in ("tied", "optimizer", "log_metric") if getattr(self.step, name)]
        flags += [f"{self.step.num_microbatches} microbatches"] * (self.step.num_microbatches > 1)
        return (
            f"step of seed {self.step.seed}, {self.step.num_ranks} ranks, {self.step.sharding}"
            f"{''.join(f', {flag}' for flag in flags)}: {blocks or 'no blocks'}\n  passes: {passes}"
        )


def _call(graph_pass: PassSpec) -> str:
    options = ", ".join(f"{name}={value!r}" for name, value in graph_pass.options.items())
    return f"{graph_pass.name}({options})" if options else graph_pass.name
