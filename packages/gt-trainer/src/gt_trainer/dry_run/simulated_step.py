"""A training step on the hardware that it is meant for: time, tokens and memory. All simulated.

Without a pipeline a step runs the graphs of its microbatches one after the other. In a pipeline a
schedule puts the graphs of its actions in time. A ``SimulatedStep`` is either: all that it says of
graphs, time and memory has the same form, and ``schedule`` has what only a pipeline has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gt_passes.simulation import (
    Hardware,
    PurposeTotal,
    Sensitivity,
    StepSimulation,
    model_flops_utilization,
    tokens_per_second_per_gpu,
    totals_by_purpose,
)
from gt_pipeline.estimates import GraphRuns, PipelineTime, RankMemory
from gt_pipeline.schedules.schedule import LoweredSchedule
from gt_trainer.dry_run.numbers_as_text import GIB, ms
from gt_trainer.dry_run.step_facts import StepFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSchedule:
    """The part of a simulated step that only a pipeline has."""

    lowered: LoweredSchedule
    """The lists of all ranks, as they were simulated."""

    time: PipelineTime
    """Time of one run of the schedule, in microseconds."""

    shared_us: float
    """Exchange of gradients of parameters that several ranks hold copies of, as of a tied weight,
    after each run of the schedule. The memory of the step leaves out what it needs, since
    activations are freed by then."""

    page_path: Path | None
    """Path of the HTML page with the timeline of the ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """A training step on hardware that it did not run on.

    Sums over ``runs`` are of one step; in a pipeline they are of one run of its schedule, and means
    over pipeline ranks.
    """

    facts: StepFacts
    hardware: Hardware
    runs: tuple[GraphRuns, ...]
    """The graph of all microbatches; those of microbatches that share gathering and reduction; or
    those of the computations of a pipeline."""

    schedule: SimulatedSchedule | None = None
    sensitivity: Sensitivity
    """Time of the step, and what it would be with other constants."""

    memory: tuple[RankMemory, ...]
    """Memory of each pipeline rank; one without a pipeline."""

    memory_at_us: tuple[float, ...]
    """The time of each moment of the fullest rank."""

    num_unsized: int
    """Values whose size depends on data and counts as nothing."""

    attention_note: str | None = None
    """How attention was captured; None if as it would run."""

    trace_path: Path | None = None
    """Path of the Perfetto trace of the fullest graph, or of the schedule."""

    @property
    def step_us(self) -> float:
        """Time of all microbatches and the optimizer."""
        return self.sensitivity.time_us

    @property
    def optimizer_us(self) -> float:
        """Time of clipping and a fused AdamW, on the rank with the most parameters."""
        return self.facts.optimizer_us(self.hardware)

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Throughput of the step."""
        return tokens_per_second_per_gpu(
            self.step_us, tokens=self.facts.tokens, num_gpus=self.facts.num_gpus
        )

    @property
    def mfu(self) -> float:
        """Fraction of the bf16 peak, by torchtitan's count of FLOPs."""
        return model_flops_utilization(
            self.tokens_per_second_per_gpu,
            flops_per_token=self.facts.flops_per_token,
            hardware=self.hardware,
        )

    @property
    def graph(self) -> StepSimulation:
        """The graph that needs the most memory, or the only one."""
        return max((each.graph for each in self.runs), key=lambda graph: graph.memory.peak_bytes)

    @property
    def run_us(self) -> float:
        """Time of one run of the schedule, or of the fullest graph."""
        return self.graph.step_us if self.schedule is None else self.schedule.time.makespan

    @property
    def computing_us(self) -> float:
        """The time for which the compute stream is busy."""
        return self.total(lambda graph: graph.compute_us)

    @property
    def by_purpose(self) -> tuple[PurposeTotal, ...]:
        """Collectives inside graphs by purpose, the most exposed first."""
        return totals_by_purpose((each.graph.collectives, each.count) for each in self.runs)

    @property
    def exposed_us(self) -> dict[str, float]:
        """The time for which the compute stream waits for collectives inside graphs, by purpose."""
        return {total.purpose: total.exposed_us for total in self.by_purpose}

    @property
    def all_exposed_us(self) -> float:
        """The time for which computation waits for communication, between actions too."""
        between = 0.0
        if self.schedule is not None:
            between = self.schedule.time.gathers + self.schedule.time.transfers
        return self.total(lambda graph: graph.exposed_us) + between

    @property
    def waiting_us(self) -> float:
        """The time for which the compute stream waits for the host, or for copies."""
        return self.total(lambda graph: graph.step_us - graph.compute_us - graph.exposed_us)

    @property
    def bubble(self) -> float:
        """The part of the step in which pipeline ranks wait for each other, communication aside."""
        if self.schedule is None:
            return 0.0
        return self.facts.num_microbatches * self.schedule.time.bubble / self.step_us

    @property
    def assumed_symbols(self) -> tuple[str, ...]:
        """Sizes that depend on data and count as 1."""
        found = (symbol for each in self.runs for symbol in each.graph.assumed_symbols)
        return tuple(dict.fromkeys(found))

    @property
    def fullest(self) -> RankMemory:
        """The memory of the rank that needs the most."""
        return max(self.memory, key=lambda each: each.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most that a rank holds at once."""
        return self.fullest.peak_bytes

    @property
    def fits(self) -> bool:
        """Whether every rank is within the device's memory."""
        return self.peak_bytes <= self.hardware.hbm_capacity_bytes

    def total(self, part: Callable[[StepSimulation], float]) -> float:
        """Sum a part of the time of the graphs over their runs."""
        return sum(each.count * part(each.graph) for each in self.runs)

    def __str__(self) -> str:
        """The step as lines for a terminal, each of them simulated or estimated."""
        num_gpus, speed = self.facts.num_gpus, self.tokens_per_second_per_gpu
        machine = f"{num_gpus:,} {self.hardware.name}"
        lines = [
            f"Simulated on {machine}, by a model of the hardware: nothing here was measured",
            f"  step             {ms(self.step_us)}, {self.mfu:.1%} MFU",
            f"  throughput       {speed:,.0f} tokens/s/GPU, {num_gpus * speed:,.0f} tokens/s",
            f"  made of          {self._parts()}; {ms(self.optimizer_us)} optimizer",
        ]
        if self.schedule is not None:
            lines.append(f"  bubble           {self.bubble:.1%} of the step")
        lines += [
            f"  exposed          {ms(total.exposed_us)} of {ms(total.duration_us)}: "
            f"{total.count:g} {total.purpose}"
            for total in self.by_purpose
        ]
        lines += [f"  exposed          {ms(us)}: {what}" for what, us in self._between().items()]
        lines += self._memory_lines()
        lines.append(f"  sensitivity      {self.sensitivity}")
        return "\n".join([*lines, *self._remarks()])

    def _parts(self) -> str:
        times, schedule, repeats = self.facts.num_microbatches, self.schedule, ""
        if times > 1 and schedule is not None:
            repeats = f"{times} runs of the schedule: "
        elif times > 1:
            share = " that gather and reduce once" if len(self.runs) > 1 else ""
            repeats = f"{times} microbatches{share}, "
        slowed_us = self.total(lambda graph: graph.slowed_us)
        slowed = f" ({ms(slowed_us)} of it slowed by collectives)" if slowed_us else ""
        copies_us = self.total(lambda graph: graph.copies_exposed_us)
        exposed = ms(sum(self.exposed_us.values()))
        parts = [
            f"{ms(self.computing_us)} computing{slowed}",
            f"{exposed} exposed {'communication' if schedule is None else 'inside actions'}",
            *([f"{ms(copies_us)} waiting for copies"] * (copies_us > 0)),
            f"{ms(max(0.0, self.waiting_us - copies_us))} waiting for the host",
        ]
        if schedule is not None:
            time, shared_us = schedule.time, schedule.shared_us
            parts += [
                f"{ms(time.gathers)} gathers and reductions",
                f"{ms(time.transfers)} transfers",
                f"{ms(time.bubble)} bubble",
                *([f"{ms(shared_us)} tied weight"] * (shared_us > 0)),
            ]
        return repeats + ", ".join(parts)

    def _between(self) -> Mapping[str, float]:
        """Communication between actions for which computation waits."""
        if self.schedule is None:
            return {}
        time, shared_us = self.schedule.time, self.schedule.shared_us
        return {
            "UNSHARD and REDUCE_GRAD, beside computation": time.gathers,
            "transfers between stages": time.transfers,
            **({"gradients of the tied weight": shared_us} if shared_us else {}),
        }

    def _memory_lines(self) -> Iterator[str]:
        capacity = self.hardware.hbm_capacity_bytes
        peak = f"{self.peak_bytes / GIB:.2f} GiB estimated of {capacity / GIB:.2f}"
        peak += "" if self.fits else "; DOES NOT FIT"
        held = [
            ", ".join(f"{size / GIB:.2f} {part}" for part, size in parts.items() if size)
            for parts in (each.peak.bytes_by_part for each in self.memory)
        ]
        if self.schedule is None:
            yield f"  peak memory      {peak}: {held[0]}"
            return
        yield f"  peak memory      {peak}"
        for each, listed in zip(self.memory, held, strict=True):
            when = "the optimizer" if each.peak.action is None else str(each.peak.action)
            over = "; DOES NOT FIT" if each.peak_bytes > capacity else ""
            gib = f"{each.peak_bytes / GIB:.2f} GiB"
            yield f"    rank {each.rank:<10} {gib} at {when}{over}: {listed}"

    def _remarks(self) -> Iterator[str]:
        guesses: Counter[str] = Counter()
        for each in self.runs:
            guesses.update(each.graph.guesses)
        if guesses:
            listed = ", ".join(f"{count} {name}" for name, count in guesses.items())
            yield f"  by bytes only    {listed}"
        if self.assumed_symbols:
            yield f"  counted as 1     {len(self.assumed_symbols)} sizes that depend on data"
        if self.num_unsized:
            yield f"  not counted      {self.num_unsized} values of unknown size"
        if self.attention_note:
            yield f"  attention        {self.attention_note}"
        if self.trace_path is not None:
            is_shared = self.schedule is None and len(self.runs) > 1
            which = "the microbatch that needs most memory; " if is_shared else ""
            yield f"  trace            {self.trace_path} ({which}open in ui.perfetto.dev)"
        if self.schedule is not None and self.schedule.page_path is not None:
            yield f"  timeline         {self.schedule.page_path}"
