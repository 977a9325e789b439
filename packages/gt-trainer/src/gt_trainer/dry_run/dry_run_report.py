"""The report of a dry run, as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gt_autoparallel import PlanJudgement
from gt_pipeline.schedules import Schedule
from gt_trainer.dry_run.numbers_as_text import GIB, ms
from gt_trainer.dry_run.simulated_balance import SimulatedBalance
from gt_trainer.dry_run.simulated_step import SimulatedStep
from gt_trainer.steps.layer_tracer import CaptureLayersReport


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedPart:
    """The graphs of one capture: a step, or a stage of a pipeline."""

    stages: str = ""
    """The stages of a pipeline that it represents; empty without one."""

    num_nodes_captured: int
    num_nodes: int
    """Operators after passes: of all actions of a stage, else of the largest graph."""

    stamping: CaptureLayersReport | None
    """How layers were stamped, or why not; None if that was not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunReport:
    """Sizes and times of the ranks that a run would have."""

    model: str
    world_size: int
    degrees: tuple[tuple[str, int], ...]
    """Mesh axes above 1, by name."""

    num_parameters: int
    """Parameters of the whole model; tied parameters count once."""

    parameters_by_rank: tuple[int, ...]
    """Numbers that a rank of each place in the pipeline stores, after sharding; one entry without a
    pipeline. Both copies of a tied weight count."""

    parameter_bytes_by_rank: tuple[int, ...]
    schedule: Schedule | None
    """The schedule of the pipeline; None without one."""

    batch_size: int
    """Samples of one microbatch on a rank."""

    seq_len: int
    memory_policy: str
    captured: tuple[CapturedPart, ...]
    collectives: tuple[tuple[str, int], ...]
    """How often each communication operator runs in a step on rank 0, after passes; empty with a
    pipeline."""

    capture_seconds: float
    passes_seconds: float
    simulated: SimulatedStep
    """A training step on the hardware that the configuration is meant for."""

    balance: SimulatedBalance | None = None
    """How stages were balanced; None if by layers."""

    beside_by_hand: PlacedByHand | None = None
    """The step with manual placement, if a solver placed another and the run could be placed so."""

    judgement: PlanJudgement | None = None
    """The plan and its rivals, if a solver placed the step and rivals were simulated."""

    placement: str | None = None
    """The choice between a pipeline's planned and its manual placement, which is the one that the
    report describes; None if there was no choice."""

    remedy: str | None = None
    """The change that makes a run fit; None if it fits already."""

    @property
    def num_parameters_per_rank(self) -> int:
        """Numbers that the rank with the most parameters stores."""
        return max(self.parameters_by_rank)

    @property
    def num_nodes_captured(self) -> int:
        """Operators as captured."""
        return sum(each.num_nodes_captured for each in self.captured)

    @property
    def num_nodes(self) -> int:
        """Operators after passes."""
        return sum(each.num_nodes for each in self.captured)

    def __str__(self) -> str:
        """The report as lines for a terminal."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        axes = " x ".join(f"{name} {degree}" for name, degree in self.degrees) or "one rank"
        fewest, most = min(self.parameters_by_rank), max(self.parameters_by_rank)
        stored = f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"
        gib = max(self.parameter_bytes_by_rank) / GIB
        batch = f"{self.batch_size} x {self.seq_len:,} tokens"
        yield f"Dry run of {self.model} on {self.world_size:,} ranks ({axes})"
        yield f"  parameters       {self.num_parameters:,}"
        yield f"  on each rank     {stored} ({gib:.2f} GiB as stored)"
        if (schedule := self.schedule) is not None:
            of = f"{schedule.num_ranks} ranks, {schedule.num_stages} stages"
            yield f"  pipeline         {schedule.name}, {of}"
            batch = f"{schedule.num_microbatches} microbatches of {batch}"
        yield f"  batch            {batch}, {self.simulated.facts.tokens:,} a step"
        yield f"  memory policy    {self.memory_policy}"
        yield from self._capture_lines()
        if self.balance is not None:
            yield str(self.balance)
        yield str(self.simulated)
        if self.remedy:
            yield f"  to make it fit   {self.remedy}"
        if self.judgement is not None:
            yield "Plans by their simulated steps, of which the fastest that fits is taken"
            yield from (f"  {line}" for line in self.judgement.lines())
        if self.beside_by_hand is not None:
            yield str(self.beside_by_hand)
        if self.placement is not None:
            yield f"  {self.placement}"

    def _capture_lines(self) -> Iterator[str]:
        if self.schedule is None:
            (step,) = self.captured
            graphs = f"{step.num_nodes_captured:,}, after passes {step.num_nodes:,}"
            how = "" if step.stamping is None else f" ({step.stamping})"
        else:
            graphs = ", ".join(f"stage {e.stages} {e.num_nodes:,}" for e in self.captured)
            stamped = sum(e.stamping is not None and e.stamping.stamped for e in self.captured)
            how = f"; {len(self.captured)} stages stand for all {self.schedule.num_stages}"
            how += f", {stamped} with stamped layers" if stamped else ""
        yield f"  operators        {graphs}"
        if self.schedule is None:
            called = ", ".join(f"{count} {name}" for name, count in self.collectives)
            yield f"  collectives      {called or 'none'}"
        yield f"  capture          {self.capture_seconds:.1f} s{how}"
        yield f"  passes           {self.passes_seconds:.1f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedByHand:
    """A planned step beside the same run with manual parallelism, at the same degrees.

    A plan is the best by the planner's prices, which are sums over windows. A simulated step has a
    graph, its passes and streams. Therefore both are captured, put through the same passes, and
    simulated.
    """

    planned: SimulatedStep
    by_hand: SimulatedStep

    @property
    def time_ratio(self) -> float:
        """Simulated time of the planned step in units of the other's."""
        return self.planned.step_us / self.by_hand.step_us

    @property
    def memory_ratio(self) -> float:
        """Estimated peak of the fullest rank in units of the other's."""
        return self.planned.peak_bytes / self.by_hand.peak_bytes

    def __str__(self) -> str:
        """Lines for a terminal."""
        lines = [
            f"  {name:<16} {ms(run.step_us)} a step, {ms(run.all_exposed_us)} exposed "
            f"communication, {run.peak_bytes / GIB:.2f} GiB{'' if run.fits else ' (DOES NOT FIT)'}"
            for name, run in (("planned", self.planned), ("by hand", self.by_hand))
        ]
        differences = (
            f"{_percent(self.time_ratio, 'more', 'less')} time",
            f"{_percent(self.memory_ratio, 'more', 'less')} memory",
        )
        return "\n".join(
            [
                "Planned and placed by hand at the same degrees, both simulated",
                *lines,
                f"  the plan takes   {', '.join(differences)}",
            ]
        )


def _percent(ratio: float, more: str, less: str) -> str:
    return f"{abs(ratio - 1):.1%} {more if ratio >= 1 else less}"
