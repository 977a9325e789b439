"""What an expert would run instead of a plan: FSDP, with tensor or expert parallelism or without.

A configuration has the memory policy that it was published with, for other machines and batches.
By hand it is compared with less recomputation, too, as long as that fits, and by FSDP alone, for
the same ranks and as many tokens a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gt_config.compile_config import MemoryPolicy
from gt_trainer.dry_run.dry_run import dry_run
from gt_trainer.dry_run.simulated_step import SimulatedStep
from gt_trainer.preflight.preflight import check_configuration
from gt_trainer.preflight.settled_defaults import settled_by_hand
from gt_trainer.trainer import GraphTrainer

__all__ = ["ExpertRun", "config_by_hand", "expert_runs", "name_of"]

_POLICIES: tuple[MemoryPolicy, ...] = (
    "full_recompute",
    "selective_alternate",
    "selective",
    "save_all",
)
"""The more is kept, the faster is a step, and the more memory it takes."""

_POLICY = "--compile.memory_policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRun:
    """One step that is placed by hand."""

    name: str
    """Degrees and memory policy."""

    run: SimulatedStep

    def __str__(self) -> str:
        fits = "" if self.run.fits else " (does not fit)"
        return (
            f"{self.name}: {self.run.step_us / 1e3:.1f} ms, "
            f"{self.run.all_exposed_us / 1e3:.1f} ms exposed, "
            f"{self.run.peak_bytes / 2**30:.2f} GiB{fits}"
        )


def expert_runs(
    config: GraphTrainer.Config, world_size: int, shipped: ExpertRun
) -> Iterator[ExpertRun]:
    """Simulate them; the first is ``shipped``.

    Args:
        config: as shipped, to be placed by a solver.
        world_size: ranks of the run.
        shipped: the step by hand at the degrees and the policy of the configuration.
    """
    own = _POLICIES.index(config.compile.memory_policy)
    for number, degrees in enumerate(_degrees(config)):
        first = _simulated(degrees, _POLICIES[own], world_size) if number else shipped
        yield first
        others = _POLICIES[own + 1 :] if first.run.fits else reversed(_POLICIES[:own])
        for policy in others:
            found = _simulated(degrees, policy, world_size)
            yield found
            if found.run.fits != first.run.fits:
                break


def config_by_hand(
    config: GraphTrainer.Config, policy: MemoryPolicy, world_size: int
) -> GraphTrainer.Config:
    """The run without a solver, that saves what ``policy`` says; it may run."""
    options = replace(config.compile, memory_policy=policy)
    by_hand = settled_by_hand(replace(config, compile=options), world_size, asked=(_POLICY,))
    assert by_hand is not None, "the configuration asks for a solver"
    check_configuration(by_hand, world_size, will_train=False)
    return by_hand


def name_of(degrees: Sequence[tuple[str, int]], policy: MemoryPolicy) -> str:
    """What a step by hand is called."""
    return f"{' x '.join(f'{name} {degree}' for name, degree in degrees)}, {policy}"


def _simulated(config: GraphTrainer.Config, policy: MemoryPolicy, world_size: int) -> ExpertRun:
    # Where no change is allowed, nobody looks for one that would fit.
    found = dry_run(
        config_by_hand(config, policy, world_size), world_size, is_allowed=lambda _: False
    )
    return ExpertRun(name=name_of(found.degrees, policy), run=found.simulated)


def _degrees(config: GraphTrainer.Config) -> Iterator[GraphTrainer.Config]:
    """As shipped, and by FSDP alone where as many samples can be given to all ranks."""
    yield config
    parallelism, training = config.parallelism, config.training
    tensor = parallelism.tensor_parallel_degree
    if tensor * parallelism.expert_parallel_degree == 1 or training.local_batch_size % tensor:
        return
    yield replace(
        config,
        parallelism=replace(parallelism, tensor_parallel_degree=1, expert_parallel_degree=1),
        training=replace(training, local_batch_size=training.local_batch_size // tensor),
    )
