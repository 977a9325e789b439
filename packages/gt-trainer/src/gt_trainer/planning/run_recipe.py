"""One way to run a model on a number of GPUs, as the flags that ask for it. No torch."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_PARALLELISM = "--parallelism."


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecipe:
    """Degrees, batch, pipeline, and what is computed again, exchanged beside, or in 8 bits."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    pp: int = 1
    schedule: str | None = None
    """Of the pipeline; None without one."""

    microbatch: int
    """Sequences of one forward."""

    global_batch: int
    """Sequences of one step."""

    memory_policy: str
    ep_overlap: bool = False
    reduces_once: bool = False
    linears: str = "none"
    """As ``--quantization.linears``."""

    skipped: tuple[str, ...] = ()
    """Of those, the ones that stay in the run's precision, as ``--quantization.skip``."""

    @property
    def num_gpus(self) -> int:
        """Ranks of the run."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp

    @property
    def sequences(self) -> int:
        """Of one step on each data-parallel rank."""
        return self.global_batch // (self.dp_replicate * self.dp_shard)

    @property
    def num_microbatches(self) -> int:
        """Forwards of one step on each data-parallel rank."""
        return self.sequences // self.microbatch

    @property
    def degrees(self) -> Mapping[str, int]:
        """Mesh axes by name."""
        names = ("dp_replicate", "dp_shard", "cp", "tp", "ep", "pp")
        return {name: getattr(self, name) for name in names}

    def settings(self) -> dict[str, object]:
        """Values by flag. What is not here is as the configuration has it.

        All microbatches of a pipeline are one run of its schedule.
        """
        is_pipelined = self.pp > 1
        settings: dict[str, object] = {
            f"{_PARALLELISM}data_parallel_replicate_degree": self.dp_replicate,
            f"{_PARALLELISM}data_parallel_shard_degree": self.dp_shard,
            f"{_PARALLELISM}context_parallel_degree": self.cp,
            f"{_PARALLELISM}tensor_parallel_degree": self.tp,
            f"{_PARALLELISM}expert_parallel_degree": self.ep,
            f"{_PARALLELISM}pipeline_parallel_degree": self.pp,
            "--training.local_batch_size": self.sequences if is_pipelined else self.microbatch,
            "--training.global_batch_size": self.global_batch,
            "--compile.memory_policy": self.memory_policy,
            "--compile.accumulation": "reduce_once" if self.reduces_once else "every_microbatch",
            "--compile.ep_overlap.enabled": self.ep_overlap,
            "--quantization.linears": self.linears,
        }
        if is_pipelined:
            settings[f"{_PARALLELISM}pipeline_parallel_schedule"] = self.schedule
            settings[f"{_PARALLELISM}pipeline_parallel_microbatch_size"] = self.microbatch
        if self.ep_overlap:
            # A microbatch may be one sequence, and attention needs all of it.
            settings["--compile.ep_overlap.chunk_dim"] = "seq"
            settings["--compile.ep_overlap.module_fqn"] = "layers.*.moe"
        if self.linears != "none" and self.skipped:
            settings["--quantization.skip"] = self.skipped
        return settings

    def flags(self) -> tuple[str, ...]:
        """The settings as typed."""
        return tuple(
            each for flag, value in self.settings().items() for each in _typed(flag, value)
        )

    def command(self, name: str, *, further: tuple[str, ...] = ()) -> str:
        """The command line that runs it.

        Args:
            name: how the model is chosen, as ``--config llama3_8b``.
            further: flags that every recipe of the plan has.
        """
        return f"gt-train {name} {shlex.join((*further, *self.flags()))}"

    def __str__(self) -> str:
        """In short, what distinguishes it."""
        return " ".join(self._parts())

    def _parts(self) -> Iterator[str]:
        axes = [f"{name} {degree}" for name, degree in self.degrees.items() if degree > 1]
        yield " x ".join(axes) or "one rank"
        yield f"| {self.num_microbatches} x {self.microbatch} seq"
        if self.schedule is not None:
            yield self.schedule
        yield self.memory_policy
        if self.ep_overlap:
            yield "EP overlap"
        if self.reduces_once:
            yield "reduce once"
        if self.linears != "none":
            yield self.linears


def _typed(flag: str, value: object) -> Iterator[str]:
    if isinstance(value, bool):
        group, _, name = flag.rpartition(".")
        yield flag if value else f"{group}.no_{name}"
        return
    yield flag
    yield ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
