"""A run without ranks, weights or data: validate, build, place, capture, simulate, and say it.

One process is rank 0 of a world that does not exist (torch's fake process group), and the model is
on the meta device, so that a configuration for a thousand GPUs is checked on a laptop.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from torchtitan.tools import filesystem

from gt_autoparallel import PlanJudgement
from gt_config.compile_config import MemoryPolicy
from gt_passes.errors import GraphChunkingError
from gt_passes.simulation import Hardware
from gt_trace import collective_counts, flex_attention_on_cpu
from gt_trainer.dry_run.beside_by_hand import PlacedByHand
from gt_trainer.dry_run.captured_dry_step import capture_dry_step
from gt_trainer.dry_run.fake_step import FakeStep, fake_step
from gt_trainer.dry_run.pipeline_dry_run import PipelineDryRunReport, pipeline_dry_run
from gt_trainer.dry_run.pipeline_judge import judged_pipeline, judged_without_a_step
from gt_trainer.dry_run.simulated_run import SimulatedRun
from gt_trainer.dry_run.step_facts import degrees_of
from gt_trainer.dry_run.step_judge import (
    config_for_judging,
    judged_step,
    keeping_the_best,
    step_judge,
)
from gt_trainer.placement.judged_run import judgement_for
from gt_trainer.placement.kept_plan import (
    JUDGEMENT_FILE,
    PLAN_FILE,
    by_hand_file_of,
    is_judged,
    plan_file_of,
    with_plan_file,
)
from gt_trainer.placement.pipeline_judgement import (
    PipelineJudgement,
    digest_of,
    written_judgement,
)
from gt_trainer.placement.plan_judge import judged_by
from gt_trainer.placement.planned_machine import PlannedMachine, planned_for
from gt_trainer.quantization.quantized_model import with_quantized_model
from gt_trainer.startup import StartupClock
from gt_trainer.steps.layer_tracer import CaptureLayersReport
from gt_trainer.trainer import GraphTrainer

Allows = Callable[[GraphTrainer.Config], bool]
"""Says whether a configuration breaks no rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunReport:
    """What one rank of the run would hold and execute."""

    model: str
    world_size: int
    degrees: tuple[tuple[str, int], ...]
    """Mesh axes above 1, by name."""

    num_parameters: int
    """Those of the whole model; tied parameters count once."""

    num_parameters_per_rank: int
    """Stored on rank 0, after sharding."""

    parameter_bytes_per_rank: int
    num_nodes_captured: int
    num_nodes: int
    """Operators after passes."""

    collectives: tuple[tuple[str, int], ...]
    """How often each communication operator runs in a step on rank 0, after passes."""

    stamping: CaptureLayersReport | None
    """How layers were stamped, or why not; None if that was not asked for."""

    capture_seconds: float
    passes_seconds: float

    local_batch_size: int
    """Samples of one microbatch on a rank."""

    seq_len: int
    memory_policy: str
    simulated: SimulatedRun
    """A training step on the hardware that the configuration is meant for."""

    beside_by_hand: PlacedByHand | None = None
    """The step placed by hand, if a solver placed this one and the run could be placed so."""

    judgement: PlanJudgement | None = None
    """The plan and its rivals, if a solver placed the step and rivals were simulated."""

    remedy: str | None = None
    """What would make a run fit that does not; None if it fits."""

    def __str__(self) -> str:
        """The report as lines for a terminal."""
        axes = " x ".join(f"{name} {degree}" for name, degree in self.degrees) or "one rank"
        communication = ", ".join(f"{count} {name}" for name, count in self.collectives) or "none"
        stamping = "" if self.stamping is None else f" ({self.stamping})"
        gib = self.parameter_bytes_per_rank / 2**30
        batch = f"{self.local_batch_size} x {self.seq_len:,} tokens"
        lines = (
            f"Dry run of {self.model} on {self.world_size:,} ranks ({axes})",
            f"  parameters       {self.num_parameters:,}",
            f"  on each rank     {self.num_parameters_per_rank:,} ({gib:.2f} GiB as stored)",
            f"  batch            {batch}, {self.simulated.facts.tokens:,} a step",
            f"  memory policy    {self.memory_policy}",
            f"  operators        {self.num_nodes_captured:,}, after passes {self.num_nodes:,}",
            f"  collectives      {communication}",
            f"  capture          {self.capture_seconds:.1f} s{stamping}",
            f"  passes           {self.passes_seconds:.1f} s",
            str(self.simulated),
            *([f"  to make it fit   {self.remedy}"] if self.remedy else []),
            *(self._judged() if self.judgement else []),
            *([str(self.beside_by_hand)] if self.beside_by_hand else []),
        )
        return "\n".join(lines)

    def _judged(self) -> Iterator[str]:
        assert self.judgement is not None
        yield "Plans by their simulated steps, of which the fastest that fits is taken"
        yield from (f"  {line}" for line in self.judgement.lines())


def dry_run(
    config: GraphTrainer.Config,
    world_size: int,
    *,
    by_hand: GraphTrainer.Config | None = None,
    hardware: Hardware | None = None,
    is_allowed: Allows = lambda _: True,
    trace_path: Path | None = None,
    timeline_path: Path | None = None,
) -> DryRunReport | PipelineDryRunReport:
    """Check that ``config`` can be built, placed and captured on ``world_size`` ranks.

    Args:
        config: a finished configuration that ``preflight`` accepts.
        world_size: number of ranks; none of them is started.
        by_hand: the same run without a solver, as ``settled_by_hand`` gives it: simulated beside
            the planned one if ``is_allowed``. A pipeline takes it where it is faster.
        hardware: the machine to simulate, and to plan for; H100 SXM by default.
        is_allowed: whether a run could have a changed configuration, for one that does not fit.
        trace_path: where to write the simulated step as a Perfetto trace; None writes none.
        timeline_path: where to write the timeline of a pipeline's ranks as an HTML page; None
            writes none.

    Raises:
        RuntimeError: a process group exists already.
        Exception: whatever building, placing or capturing raises, as in a real run.
    """
    config = with_quantized_model(config)
    # The plan with which the run would go on.
    config = replace(config, compile=with_plan_file(config.compile, plan_file_of(config)))
    with planned_for(PlannedMachine(hardware=hardware, is_simulated=True)):
        return _dry_run(
            config,
            world_size,
            by_hand=by_hand,
            hardware=hardware,
            is_allowed=is_allowed,
            trace_path=trace_path,
            timeline_path=timeline_path,
        )


def _dry_run(
    config: GraphTrainer.Config,
    world_size: int,
    *,
    by_hand: GraphTrainer.Config | None,
    hardware: Hardware | None,
    is_allowed: Allows,
    trace_path: Path | None,
    timeline_path: Path | None,
) -> DryRunReport | PipelineDryRunReport:
    if by_hand is not None and not is_allowed(by_hand):
        by_hand = None
    kept = by_hand_file_of(config)
    if by_hand is not None and kept is not None:
        judgement = judgement_for(kept, config, world_size)
        report = _captured(by_hand, world_size, hardware, trace_path, timeline_path)
        assert isinstance(report, PipelineDryRunReport)
        report = replace(report, placement=f"{judgement}, kept in {kept}")
        config, by_hand = by_hand, None
    else:
        try:
            report = _captured(config, world_size, hardware, trace_path, timeline_path)
        except GraphChunkingError as error:
            if by_hand is None or not is_judged(config):
                raise
            judgement = judged_without_a_step(config, world_size, error)
            _leave_for_a_start(config, judgement)
            report = _captured(by_hand, world_size, hardware, trace_path, timeline_path)
            assert isinstance(report, PipelineDryRunReport)
            report = replace(report, placement=str(judgement))
            config, by_hand = by_hand, None
    if by_hand is not None:
        expert = _captured(by_hand, world_size, hardware)
        beside = PlacedByHand(planned=report.simulated, by_hand=expert.simulated)
        if isinstance(report, PipelineDryRunReport) and is_judged(config):
            assert isinstance(expert, PipelineDryRunReport)
            judgement = judged_pipeline(
                config, world_size, planned=report.simulated, by_hand=expert.simulated
            )
            _leave_for_a_start(config, judgement)
            if judgement.takes_by_hand:
                report = expert
                if trace_path is not None or timeline_path is not None:  # which show the plan's
                    _captured(by_hand, world_size, hardware, trace_path, timeline_path)
            report = replace(report, placement=str(judgement))
        report = replace(report, beside_by_hand=beside)
    if report.simulated.fits:
        return report
    return replace(report, remedy=_remedy(config, world_size, hardware, is_allowed))


def _leave_for_a_start(config: GraphTrainer.Config, judgement: PipelineJudgement) -> None:
    """Write to the dump folder, where the plan is, which step is taken."""
    if filesystem.is_remote(config.dump_folder):
        return
    folder = Path(config.dump_folder)
    digest = digest_of((folder / PLAN_FILE).read_bytes())
    left = replace(judgement, plan_digest=digest)
    (folder / JUDGEMENT_FILE).write_bytes(written_judgement(left))


def _remedy(
    config: GraphTrainer.Config, world_size: int, hardware: Hardware | None, is_allowed: Allows
) -> str:
    """The first change that makes the run fit, those that cost less speed first."""
    if config.compile.autoparallel:
        return "a smaller --compile.autoparallel_solver.memory_budget_gib, or more ranks"
    for flags, changed in changes_that_need_less(config, is_allowed):
        simulated = _captured(changed, world_size, hardware).simulated
        if simulated.fits:
            gib = simulated.peak_bytes / 2**30
            speed = simulated.tokens_per_second_per_gpu
            return f"{flags} ({gib:.1f} GiB estimated, {speed:,.0f} tokens/s/GPU simulated)"
    return "more ranks or other degrees: neither recomputation nor a smaller batch is enough"


def changes_that_need_less(
    config: GraphTrainer.Config, is_allowed: Allows
) -> Iterator[tuple[str, GraphTrainer.Config]]:
    """Configurations that may run and need ever less memory, and the flags that make them."""
    if config.compile.accumulation == "reduce_once":
        # Nothing is computed again for that.
        options = replace(config.compile, accumulation="every_microbatch")
        changed = replace(config, compile=options)
        if is_allowed(changed):
            config = changed
            yield "--compile.accumulation every_microbatch", config
    policies: tuple[MemoryPolicy, ...] = (
        "save_all",
        "selective",
        "selective_alternate",
        "full_recompute",
    )
    policy, flags = config.compile.memory_policy, ""
    for less in policies[policies.index(policy) + 1 :] if policy in policies else policies[-1:]:
        changed = replace(config, compile=replace(config.compile, memory_policy=less))
        if is_allowed(changed):
            config, flags = changed, f"--compile.memory_policy {less}"
            yield flags, config
    if config.parallelism.pipeline_parallel_degree > 1:
        policy_flags = flags
        for flag, changed in _changes_of_pipeline(config, is_allowed):
            config, flags = changed, f"{policy_flags} {flag}".strip()
            yield flags, config
    batch_size = config.training.local_batch_size
    while batch_size > 1:
        batch_size //= 2
        training = replace(config.training, local_batch_size=batch_size)
        changed = replace(config, training=training)
        if is_allowed(changed):
            yield f"{flags} --training.local_batch_size {batch_size}".strip(), changed


def _changes_of_pipeline(
    config: GraphTrainer.Config, is_allowed: Allows
) -> Iterator[tuple[str, GraphTrainer.Config]]:
    """Fewer dW put off, where the schedule puts any off; then smaller microbatches."""
    flags = ""
    put_off = config.compile.pipeline_deferred_weights
    put_off = put_off or config.parallelism.pipeline_parallel_degree
    while put_off > 1:
        put_off //= 2
        options = replace(config.compile, pipeline_deferred_weights=put_off)
        changed = replace(config, compile=options)
        if is_allowed(changed):
            config, flags = changed, f"--compile.pipeline_deferred_weights {put_off}"
            yield flags, config
    size = config.parallelism.pipeline_parallel_microbatch_size
    while size > 1:
        size //= 2
        parallelism = replace(config.parallelism, pipeline_parallel_microbatch_size=size)
        changed = replace(config, parallelism=parallelism)
        if is_allowed(changed):
            flag = f"--parallelism.pipeline_parallel_microbatch_size {size}"
            yield f"{flags} {flag}".strip(), changed


def _captured(
    config: GraphTrainer.Config,
    world_size: int,
    hardware: Hardware | None,
    trace_path: Path | None = None,
    timeline_path: Path | None = None,
) -> DryRunReport | PipelineDryRunReport:
    if config.parallelism.pipeline_parallel_degree > 1:
        return pipeline_dry_run(
            config,
            world_size,
            hardware=hardware,
            trace_path=trace_path,
            timeline_path=timeline_path,
        )
    best: list[DryRunReport] = []
    judged = config_for_judging(config)

    def simulate(step: FakeStep) -> SimulatedRun:
        report = _report(judged, step, hardware=hardware)
        if not best or judged_step(report.simulated).is_better_than(judged_step(best[0].simulated)):
            best[:] = [report]
        return report.simulated

    with (
        judged_by(step_judge(judged, simulate)) as judging,
        fake_step(config, world_size) as step,
        flex_attention_on_cpu(),
    ):
        if not best or trace_path is not None or judged != config:
            best[:] = [_report(config, step, hardware=hardware, trace_path=trace_path)]
    return replace(best[0], judgement=judging.judgement)


def plan_before_training(
    config: GraphTrainer.Config,
    world_size: int,
    *,
    best_path: Path,
    hardware: Hardware | None = None,
) -> PlanJudgement | None:
    """Find the plan that a run will train with; it is written to the dump folder.

    For a process that has no process group yet. Runs that differ only in what is done to the
    captured step get the same plan (``config_for_judging``); eager runs get that of captured ones.

    Args:
        config: as for ``dry_run``, with a solver and without a pipeline. Not changed.
        world_size: as for ``dry_run``.
        best_path: file for the best plan yet, for whoever ends the search.
        hardware: the machine to plan for and to simulate; H100 SXM by default.

    Raises:
        Exception: whatever building, placing or capturing raises.
    """
    config = config_for_judging(config)

    def simulate(step: FakeStep) -> SimulatedRun:
        return _report(config, step, hardware=hardware).simulated

    new_judge = keeping_the_best(step_judge(config, simulate), best_path)
    with judged_by(new_judge) as judging, fake_step(config, world_size):
        return judging.judgement


def _report(
    config: GraphTrainer.Config,
    step: FakeStep,
    *,
    hardware: Hardware | None,
    trace_path: Path | None = None,
) -> DryRunReport:
    begin = time.perf_counter()
    clock = StartupClock()
    captured = capture_dry_step(config, step, clock)
    report, stored = captured.report, captured.stored
    total = time.perf_counter() - begin
    passes = clock.seconds("passes")
    spec = config.model_spec
    assert spec is not None
    simulated = captured.simulate(hardware, trace_path=trace_path)
    return DryRunReport(
        model=f"{spec.name} {spec.flavor}",
        world_size=step.parallel_dims.world_size,
        degrees=degrees_of(step.parallel_dims),
        num_parameters=step.num_parameters,
        num_parameters_per_rank=sum(p.numel() for p in stored),
        parameter_bytes_per_rank=sum(p.numel() * p.element_size() for p in stored),
        num_nodes_captured=report.num_nodes_captured,
        num_nodes=report.num_nodes,
        collectives=_collectives(simulated),
        stamping=report.stamping,
        capture_seconds=total - passes,
        passes_seconds=passes,
        local_batch_size=config.training.local_batch_size,
        seq_len=config.training.seq_len,
        memory_policy=config.compile.memory_policy,
        simulated=simulated,
    )


def _collectives(simulated: SimulatedRun) -> tuple[tuple[str, int], ...]:
    """How often each communication operator runs in a step."""
    counts: Counter[str] = Counter()
    for each in simulated.runs:
        for name, count in collective_counts(each.graph_module).items():
            counts[name] += each.count * count
    return tuple(counts.items())
