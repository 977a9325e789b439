"""A run without ranks, weights or data: validate, build, place, capture, simulate, and say it.

One process is rank 0 of a world that does not exist (torch's fake process group), and the model is
on the meta device, so that a configuration for a thousand GPUs is checked on a laptop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger

from gt_autoparallel import PlanJudgement
from gt_config.compile_config import MemoryPolicy
from gt_passes.errors import GraphChunkingError
from gt_passes.simulation import Hardware
from gt_trace import collective_counts, flex_attention_on_cpu
from gt_trainer.dry_run.captured_dry_step import (
    CapturedDryStep,
    capture_divided,
    capture_dry_step,
)
from gt_trainer.dry_run.dry_run_report import CapturedPart, DryRunReport, PlacedByHand
from gt_trainer.dry_run.fake_pipeline import planned_pipeline
from gt_trainer.dry_run.fake_step import FakeStep, MetaModel, fake_ranks, fake_step, meta_model
from gt_trainer.dry_run.simulated_balance import (
    SimulatedBalance,
    simulated_balance,
    with_stages,
)
from gt_trainer.dry_run.simulated_step import SimulatedStep
from gt_trainer.dry_run.step_facts import degrees_of
from gt_trainer.dry_run.step_judge import (
    config_for_judging,
    judged_pipeline,
    judged_step,
    keeping_the_best,
    step_judge,
)
from gt_trainer.parallelism_options import balance_of
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
from gt_trainer.steps.training_step import num_operators
from gt_trainer.trainer import GraphTrainer

Allows = Callable[[GraphTrainer.Config], bool]
"""Says whether a configuration breaks no rule."""


def dry_run(
    config: GraphTrainer.Config,
    world_size: int,
    *,
    by_hand: GraphTrainer.Config | None = None,
    hardware: Hardware | None = None,
    is_allowed: Allows = lambda _: True,
    trace_path: Path | None = None,
    timeline_path: Path | None = None,
) -> DryRunReport:
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

    def drawn(of: GraphTrainer.Config) -> DryRunReport:
        return captured_report(
            of, world_size, hardware=hardware, trace_path=trace_path, timeline_path=timeline_path
        )

    with planned_for(PlannedMachine(hardware=hardware, is_simulated=True)):
        if by_hand is not None and not is_allowed(by_hand):
            by_hand = None
        kept = by_hand_file_of(config)
        if by_hand is not None and kept is not None:
            placement = f"{judgement_for(kept, config, world_size)}, kept in {kept}"
            report = replace(drawn(by_hand), placement=placement)
            config, by_hand = by_hand, None
        else:
            try:
                report = drawn(config)
            except GraphChunkingError as error:
                if by_hand is None or not is_judged(config):
                    raise
                judgement = judged_pipeline(config, world_size, planned=error)
                _leave_for_a_start(config, judgement)
                report = replace(drawn(by_hand), placement=str(judgement))
                config, by_hand = by_hand, None
        if by_hand is not None:
            expert = captured_report(by_hand, world_size, hardware=hardware)
            beside = PlacedByHand(planned=report.simulated, by_hand=expert.simulated)
            if is_judged(config):
                judgement = judged_pipeline(
                    config, world_size, planned=report.simulated, by_hand=expert.simulated
                )
                _leave_for_a_start(config, judgement)
                if judgement.takes_by_hand:
                    report = expert
                    if trace_path is not None or timeline_path is not None:  # which show the plan's
                        drawn(by_hand)
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
        simulated = captured_report(changed, world_size, hardware=hardware).simulated
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

    def simulate(step: FakeStep) -> SimulatedStep:
        return capture_dry_step(config, step).simulate(hardware)

    new_judge = keeping_the_best(step_judge(config, simulate), best_path)
    with judged_by(new_judge) as judging, fake_step(config, world_size):
        return judging.judgement


def judge_before_training(
    config: GraphTrainer.Config,
    by_hand: GraphTrainer.Config,
    world_size: int,
    *,
    hardware: Hardware | None = None,
) -> PipelineJudgement:
    """Plan a pipeline, and compare its simulated step with the one by manual parallelism.

    For a process that has no process group yet. The plans are written to the dump folder, and how
    stages were balanced is logged.

    Args:
        config: as for ``dry_run``, with a solver and a pipeline. Not changed.
        by_hand: the same run without a solver, as ``settled_by_hand`` gives it. Not changed.
        world_size: as for ``dry_run``.
        hardware: the machine to plan for and to simulate; H100 SXM by default.

    Raises:
        Exception: whatever building, placing or capturing raises, except that the plan's stages
            cannot run in chunks.
    """
    try:
        planned = captured_report(with_quantized_model(config), world_size, hardware=hardware)
    except GraphChunkingError as error:
        return judged_pipeline(config, world_size, planned=error)
    expert = captured_report(with_quantized_model(by_hand), world_size, hardware=hardware)
    if planned.balance is not None:
        for line in str(planned.balance).splitlines():
            logger.info(line)
    return judged_pipeline(config, world_size, planned=planned.simulated, by_hand=expert.simulated)


def captured_report(
    config: GraphTrainer.Config,
    world_size: int,
    *,
    hardware: Hardware | None = None,
    trace_path: Path | None = None,
    timeline_path: Path | None = None,
) -> DryRunReport:
    """Capture and simulate the step of one configuration, and no other beside it.

    Args:
        config: as for ``dry_run``.
        world_size: as for ``dry_run``.
        hardware: as for ``dry_run``.
        trace_path: as for ``dry_run``.
        timeline_path: as for ``dry_run``.

    Raises:
        RuntimeError: a process group exists already.
        Exception: whatever building, placing or capturing raises, as in a real run.
    """
    if config.parallelism.pipeline_parallel_degree > 1:
        with fake_ranks(world_size), flex_attention_on_cpu():
            # One model: two meshes of the same ranks are one for DTensor, with the groups of
            # either.
            built = meta_model(config, world_size)
            config, balance = _balanced(config, built, hardware)
            pipeline = capture_divided(config, built, planned_pipeline(config))
            report = _report(pipeline, hardware, trace_path, timeline_path)
            return replace(report, balance=balance)
    best: list[DryRunReport] = []
    judged = config_for_judging(config)

    def simulate(step: FakeStep) -> SimulatedStep:
        report = _report(capture_dry_step(judged, step), hardware)
        if not best or judged_step(report.simulated).is_better_than(judged_step(best[0].simulated)):
            best[:] = [report]
        return report.simulated

    with (
        judged_by(step_judge(judged, simulate)) as judging,
        fake_step(config, world_size) as step,
        flex_attention_on_cpu(),
    ):
        if not best or trace_path is not None or judged != config:
            best[:] = [_report(capture_dry_step(config, step), hardware, trace_path)]
    return replace(best[0], judgement=judging.judgement)


def _balanced(
    config: GraphTrainer.Config, built: MetaModel, hardware: Hardware | None
) -> tuple[GraphTrainer.Config, SimulatedBalance | None]:
    """Name the stages of a pipeline if they are to be balanced, or if a plan has named them."""
    if balance_of(config.parallelism) == "layers":
        return config, None
    if (path := plan_file_of(config)) is not None:
        # Imported here: no other dry run pays for the solver.
        from gt_trainer.pipelines.planned_stages import stages_of_plan

        return with_stages(config, stages_of_plan(path)), None
    balance = simulated_balance(config, built, hardware=hardware)
    return with_stages(config, balance.names_per_stage), balance


def _report(
    captured: CapturedDryStep,
    hardware: Hardware | None,
    trace_path: Path | None = None,
    timeline_path: Path | None = None,
) -> DryRunReport:
    config, dims = captured.config, captured.built.parallel_dims
    spec, plan, stored = config.model_spec, captured.plan, captured.stored
    assert spec is not None
    is_pipelined = plan is not None
    simulated = captured.simulate(hardware, trace_path=trace_path, page_path=timeline_path)
    return DryRunReport(
        model=f"{spec.name} {spec.flavor}",
        world_size=dims.world_size,
        degrees=degrees_of(dims),
        num_parameters=captured.built.num_parameters,
        parameters_by_rank=tuple(sum(p.numel() for p in each) for each in stored),
        parameter_bytes_by_rank=tuple(
            sum(p.numel() * p.element_size() for p in each) for each in stored
        ),
        schedule=plan.schedule if plan is not None else None,
        batch_size=(
            config.parallelism.pipeline_parallel_microbatch_size
            if is_pipelined
            else config.training.local_batch_size
        ),
        seq_len=config.training.seq_len,
        memory_policy=config.compile.memory_policy,
        captured=tuple(_captured_parts(captured)),
        collectives=() if is_pipelined else _collectives(simulated),
        capture_seconds=captured.capture_seconds,
        passes_seconds=captured.passes_seconds,
        simulated=simulated,
    )


def _captured_parts(captured: CapturedDryStep) -> Iterator[CapturedPart]:
    """The captures of a step, with the names of the stages that each represents."""
    if captured.plan is None:
        (report,) = captured.reports
        yield CapturedPart(
            num_nodes_captured=report.num_nodes_captured,
            num_nodes=report.num_nodes,
            stamping=report.stamping,
        )
        return
    for stage, report in zip(captured.captured, captured.reports, strict=True):
        indices = [i for i, each in enumerate(captured.stages) if each is stage]
        first, last = indices[0], indices[-1]
        is_range = len(indices) > 1 and indices == list(range(first, last + 1))
        yield CapturedPart(
            stages=f"{first}-{last}" if is_range else " and ".join(map(str, indices)),
            num_nodes_captured=report.num_nodes_captured,
            num_nodes=sum(num_operators(e.graph_module) for e in stage.actions.values()),
            stamping=report.stamping,
        )


def _collectives(simulated: SimulatedStep) -> tuple[tuple[str, int], ...]:
    """How often each communication operator runs in a step."""
    counts: Counter[str] = Counter()
    for each in simulated.runs:
        for name, count in collective_counts(each.graph_module).items():
            counts[name] += int(each.count) * count
    return tuple(counts.items())
