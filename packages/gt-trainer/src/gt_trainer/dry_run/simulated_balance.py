"""Stages balanced by simulated time: ``--parallelism.pipeline_parallel_balance``.

What stands before the layers, one layer of each kind, and what stands after them with the loss are
captured as stages of their own, by the code of a dry run, and priced on the machine that the run
is meant for; where a solver places the run (``planned``), it places these.
``gt_pipeline.estimates.balanced_division`` divides the model by the prices. A run does it on rank 0
before it has a process group (``gt_trainer.run``), a dry run within its fake ranks, and both find
the same: nothing is measured (docs/decisions/0028-balance-by-simulation.md).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast, get_args

from torchtitan.models.common.decoder import Decoder

from gt_config.graph_kinds import PIPELINE_ACTIONS
from gt_config.node_keys import OverlappedBackward, PipelineAction
from gt_passes.simulation import CostModel, Hardware, SymbolSizes, h100_sxm
from gt_pipeline.estimates import (
    ActionMemory,
    PipelineUnits,
    PricedStages,
    StageMemory,
    UnitTimes,
    balanced_division,
    joined_memory,
    memory_of_one,
    overlapped_memory,
    rank_memory,
    symbol_sizes_of,
)
from gt_pipeline.schedules import Action, Schedule, lower, peak_live, schedule_of
from gt_pipeline.schedules.dependencies import transferred_by
from gt_pipeline.schedules.schedule import LoweredSchedule
from gt_pipeline.split import TORCHTITAN_NAMING
from gt_trace import flex_attention_on_cpu
from gt_trainer.dry_run.captured_dry_step import CapturedDryStep, capture_divided
from gt_trainer.dry_run.equal_stages import equal_stages
from gt_trainer.dry_run.fake_pipeline import planned_pipeline
from gt_trainer.dry_run.fake_step import MetaModel, fake_ranks, meta_model
from gt_trainer.dry_run.numbers_as_text import GIB, ms
from gt_trainer.dry_run.simulate_steps import group_labels
from gt_trainer.pipelines.pipeline_plan import PipelinePlan, ranks_of_pipelines
from gt_trainer.pipelines.split_model import gathered_bytes_limit
from gt_trainer.quantization.quantized_model import with_quantized_model
from gt_trainer.trainer import GraphTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancedStage:
    """What one stage has, and how long it computes for a microbatch."""

    names: tuple[str, ...]
    compute_us: float
    """Forward and backward, simulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedBalance:
    """Modules of each stage, found by simulated time."""

    hardware: str
    is_planned: bool
    """Whether a solver has placed the modules that were priced."""

    stages: tuple[BalancedStage, ...]
    before: tuple[BalancedStage, ...]
    """What ``--parallelism.pipeline_parallel_balance layers`` gives."""

    makespan_us: float
    """Of one run of the schedule, by what modules take."""

    makespan_before_us: float
    peak_bytes: int
    """Of the fullest rank, estimated by what modules hold; within the memory of the hardware, or no
    more than by layers."""

    kinds: tuple[tuple[str, int, float], ...]
    """Modules that were captured: a name, how many are alike, microseconds of a microbatch."""

    seconds: float
    """What finding it took."""

    @property
    def names_per_stage(self) -> list[list[str]]:
        """As ``--parallelism.module_fqns_per_model_part`` takes it."""
        return [list(stage.names) for stage in self.stages]

    @property
    def is_changed(self) -> bool:
        """Whether it is another division than that by layers."""
        return self.stages != self.before

    def __str__(self) -> str:
        """The plan as lines of a log."""
        if self.is_changed:
            gain = 1 - self.makespan_us / self.makespan_before_us
            found = (
                f"{ms(self.makespan_us)} a run of the schedule, {gain:.1%} less than "
                f"{ms(self.makespan_before_us)} by layers"
            )
        else:
            found = f"as by layers, {ms(self.makespan_us)} a run of the schedule: none is faster"
        alike = ", ".join(
            f"{name} {ms(us)}" + (f" (and {count - 1} alike)" if count > 1 else "")
            for name, count, us in self.kinds
        )
        of_what = " of placed modules" if self.is_planned else ""
        lines = [
            f"Stages balanced by simulated time{of_what} on {self.hardware}: {found}",
            f"  of a microbatch  {alike}",
        ]
        for index, (stage, before) in enumerate(zip(self.stages, self.before, strict=True)):
            line = f"    stage {index:<9} {ms(stage.compute_us)}: {_in_short(stage.names)}"
            is_other = abs(stage.compute_us - before.compute_us) >= 0.5  # of a microsecond
            lines.append(line + f" (by layers {ms(before.compute_us)})" * is_other)
        lines.append(f"  peak memory      {self.peak_bytes / GIB:.2f} GiB estimated by modules")
        lines.append(f"  found in         {self.seconds:.1f} s")
        return "\n".join(lines)


def with_stages(config: GraphTrainer.Config, names: list[list[str]]) -> GraphTrainer.Config:
    """The configuration with these modules on each stage."""
    named = replace(config.parallelism, module_fqns_per_model_part=names)
    return replace(config, parallelism=named)


def balance_before_training(
    config: GraphTrainer.Config, world_size: int, *, hardware: Hardware | None = None
) -> SimulatedBalance:
    """As ``simulated_balance``, for a process that has no process group yet."""
    config = with_quantized_model(config)
    with fake_ranks(world_size), flex_attention_on_cpu():
        return simulated_balance(config, meta_model(config, world_size), hardware=hardware)


def simulated_balance(
    config: GraphTrainer.Config, built: MetaModel, *, hardware: Hardware | None = None
) -> SimulatedBalance:
    """Capture and price each kind of module, and divide the model; within ``fake_ranks``.

    Eager stages (``compile.mode none``) are divided as captured ones would be.

    Args:
        config: a finished configuration that ``preflight`` accepts; its pipeline degree is 2 or
            more, and its stages have no names. Not changed.
        built: its model. Not changed.
        hardware: the machine that prices; H100 SXM by default.

    Raises:
        Exception: whatever building, placing or capturing raises.
    """
    begin = time.perf_counter()
    machine = hardware or h100_sxm()
    config = replace(config, compile=replace(config.compile, mode="aot_fx_trace"))
    plan = planned_pipeline(config)
    schedule = plan.schedule
    modules = _units([name for names in plan.names_per_stage for name in names])
    captured = _captured_units(config, built, plan, modules)
    priced = _priced(config, captured, schedule, machine)
    units = priced.units
    before = [len(_units(names)) for names in plan.names_per_stage]
    lowered = _lowering(schedule, priced.unsharded_bytes, gathered_bytes_limit(config.compile))

    def peak_bytes(counts: Sequence[int]) -> int:
        return _peak_bytes(lowered(counts), priced.memory, counts)

    allowed = max(machine.hbm_capacity_bytes, peak_bytes(before))
    division = balanced_division(
        units,
        schedule,
        before=before,
        lowered=lowered,
        fits=lambda counts: (
            not _has_new_lone_layer(modules, counts, before) and peak_bytes(counts) <= allowed
        ),
    )

    def stages(counts: Sequence[int]) -> tuple[BalancedStage, ...]:
        names, times = _by_stage(modules, counts), _by_stage(units.times, counts)
        return tuple(
            BalancedStage(
                names=tuple(itertools.chain(*of_stage)),
                compute_us=sum(each.compute for each in times_of_stage),
            )
            for of_stage, times_of_stage in zip(names, times, strict=True)
        )

    kinds = dict.fromkeys(each.kind for each in units.times)
    return SimulatedBalance(
        hardware=machine.name,
        is_planned=config.compile.autoparallel,
        stages=stages(division.counts),
        before=stages(before),
        makespan_us=division.makespan,
        makespan_before_us=division.makespan_before,
        peak_bytes=peak_bytes(division.counts),
        kinds=tuple(
            (
                " + ".join(modules[kind]),
                sum(each.kind == kind for each in units.times),
                units.times[kind].compute,
            )
            for kind in kinds
        ),
        seconds=time.perf_counter() - begin,
    )


def _has_new_lone_layer(
    modules: Sequence[tuple[str, ...]], counts: Sequence[int], before: Sequence[int]
) -> bool:
    """Whether a stage that was more is one layer and nothing else: see ``_captured_units``."""
    return any(
        len(stage) == 1 < was and stage[0][0].startswith(f"{TORCHTITAN_NAMING.layers}.")
        for stage, was in zip(_by_stage(modules, counts), before, strict=True)
    )


UnitT = TypeVar("UnitT")


def _by_stage(units: Sequence[UnitT], counts: Sequence[int]) -> Iterator[Sequence[UnitT]]:
    """Divide units into stages of so many each."""
    ends = itertools.accumulate(counts)
    return (units[end - count : end] for end, count in zip(ends, counts, strict=True))


def _units(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Modules that stay together: what stands after the layers is one, with the loss."""
    last = tuple(name for name in names if name in TORCHTITAN_NAMING.last)
    return [(name,) for name in names if name not in last] + [last] * bool(last)


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnitPlan(PipelinePlan):
    """Units as stages of their own, each placed as if it stood in a stage of a pipeline."""

    within: PipelinePlan
    shares: tuple[float, ...]
    """Of a rank's memory, what each may take."""

    @property
    def num_microbatches(self) -> int:
        return self.within.num_microbatches

    def memory_share(self, stage: int) -> float:
        return self.shares[stage]


def _memory_shares(plan: PipelinePlan, stages: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """What a solver gives units: layers what there is for each, the ends what there is for a stage.

    A stage has one end at most besides its layers, whatever that takes. What a stage really needs
    is seen when it is placed.
    """
    counts = [len(_units(names)) for names in plan.names_per_stage]
    schedule = plan.schedule
    of_a_rank = max(
        sum(counts[stage] for stage in schedule.stages_of_rank(rank))
        for rank in range(schedule.num_ranks)
    )
    last = len(stages) - 1
    return tuple(
        plan.memory_share(0) if place in (0, last) else len(units) / of_a_rank
        for place, units in enumerate(stages)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _CapturedUnits:
    """What stands for each unit: a stage of one, or of two that are alike."""

    pipeline: CapturedDryStep
    kinds: tuple[int, ...]
    """For each unit the first that is like it."""

    stage_of: Mapping[int, int]
    """The stage that was captured for a kind."""

    num_units: Mapping[int, int]
    """Units of that stage."""


def _captured_units(
    config: GraphTrainer.Config,
    built: MetaModel,
    plan: PipelinePlan,
    modules: Sequence[tuple[str, ...]],
) -> _CapturedUnits:
    """Layers are captured by twos: one alone may not be computed again where several are.

    (``recompute-tagged`` leaves a stage as it is where that would raise the peak of a microbatch,
    as it may with a single layer, all of which is needed at once.)
    """
    assert config.model_spec is not None
    model_config = config.model_spec.model
    assert isinstance(model_config, Decoder.Config)
    kinds = equal_stages(modules, model_config.layers)
    stages: list[list[int]] = []
    for index, kind in enumerate(kinds):
        last = stages[-1] if stages else []
        if len(last) == 1 and kinds[last[0]] == kind:
            last.append(index)
        else:
            stages.append([index])
    stage_of: dict[int, int] = {}
    for place, units in enumerate(stages):
        known = stage_of.setdefault(kinds[units[0]], place)
        if len(units) > len(stages[known]):
            stage_of[kinds[units[0]]] = place
    options, schedule = config.compile, plan.schedule
    num_live = plan.live_microbatches
    if options.offload_host_gib is not None:
        # What one microbatch of one stage may offload, for as much of it as is captured together.
        num_chunks = max(peak_live(schedule)) * len(stages) / schedule.num_stages
        gib = options.offload_host_gib * num_live / num_chunks
        config = replace(config, compile=replace(options, offload_host_gib=gib))
    # Under GPipe all microbatches are live at once.
    alone = schedule_of(
        "GPipe", num_ranks=len(stages), num_stages=len(stages), num_microbatches=num_live
    )
    names = tuple(tuple(name for unit in units for name in modules[unit]) for units in stages)
    return _CapturedUnits(
        pipeline=capture_divided(
            config,
            built,
            _UnitPlan(
                schedule=alone,
                names_per_stage=names,
                within=plan,
                shares=_memory_shares(plan, stages),
            ),
            publishes_plans=False,
        ),
        kinds=kinds,
        stage_of=stage_of,
        num_units={kind: len(stages[place]) for kind, place in stage_of.items()},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _PricedUnits:
    units: PipelineUnits
    unsharded_bytes: tuple[int, ...]
    """What each unit gathers."""

    memory: tuple[StageMemory, ...]
    """What each unit holds as a stage."""


def _peak_bytes(
    lowered: LoweredSchedule, units: Sequence[StageMemory], counts: Sequence[int]
) -> int:
    """The estimated peak of the fullest rank."""
    stages = dict(enumerate(map(joined_memory, _by_stage(units, counts))))

    def pair(action: Action) -> ActionMemory:
        assert action.parts is not None
        forward, backward = action.parts
        return overlapped_memory(
            stages[forward.stage].actions["FORWARD"],
            stages[backward.stage].actions[cast("PipelineAction", backward.kind)],
        )

    return max(
        rank_memory(lowered, rank=rank, stages=stages, pair=pair).peak_bytes
        for rank in range(lowered.num_ranks)
    )


def _priced(
    config: GraphTrainer.Config, captured: _CapturedUnits, schedule: Schedule, machine: Hardware
) -> _PricedUnits:
    pipeline, stage_of, num_units = captured.pipeline, captured.stage_of, captured.num_units
    assert pipeline.plan is not None
    cost_model = CostModel(
        machine,
        sizes=SymbolSizes(symbol_sizes_of(pipeline.stages)),
        host="cuda_graph" if config.compile.cuda_graphs else "eager",
    )
    ranks, *_ = ranks_of_pipelines(schedule.num_ranks, pipeline.built.parallel_dims.world_size)
    priced = PricedStages(
        pipeline.stages,
        pipeline.plan.schedule,
        cost_model,
        ranks=range(len(pipeline.stages)),
        group_labels=group_labels(pipeline.built.parallel_dims),
    )
    cost = priced.costs()

    def time_of(kind: int, action: PipelineAction) -> float:
        microbatch = None if action in ("UNSHARD", "REDUCE_GRAD") else 0
        return cost(Action(stage_of[kind], action, microbatch)) / num_units[kind]

    single = [action for action in PIPELINE_ACTIONS if action != "OVERLAP_F_B"]
    times = {
        kind: UnitTimes(actions={each: time_of(kind, each) for each in single}, kind=kind)
        for kind in stage_of
    }
    bytes_between = priced.memory[0].leaving_bytes

    def transfer(action: Action) -> float:
        product = transferred_by(action)
        ends = [ranks[schedule.stage_to_rank[s]] for s in (product.stage, product.consumer_stage)]
        return cost_model.collective_us("send_receive", bytes_between, ends)

    saved: dict[tuple[int, int, PipelineAction], float] = {}
    layers = [kind for kind in stage_of if kind not in (0, len(captured.kinds) - 1)]
    for backward in _overlapped(schedule):
        for one, other in itertools.product(layers, layers):
            parts = Action(stage_of[one], "FORWARD", 0), Action(stage_of[other], backward, 1)
            gained = sum(map(cost, parts)) - cost(Action.overlap(*parts))
            saved[one, other, backward] = max(0.0, gained) / min(num_units[one], num_units[other])
    memory = {
        kind: memory_of_one(priced.memory[place], num_units[kind])
        for kind, place in stage_of.items()
    }
    unsharded = {
        kind: pipeline.stages[place].unsharded_bytes // num_units[kind]
        for kind, place in stage_of.items()
    }
    return _PricedUnits(
        units=PipelineUnits(
            times=tuple(times[kind] for kind in captured.kinds), transfer=transfer, saved=saved
        ),
        unsharded_bytes=tuple(unsharded[kind] for kind in captured.kinds),
        memory=tuple(memory[kind] for kind in captured.kinds),
    )


def _overlapped(schedule: Schedule) -> list[OverlappedBackward]:
    """The kinds of backward that run together with a forward."""
    found = {
        action.parts[1].kind
        for actions in schedule.compute
        for action in actions
        if action.parts is not None
    }
    kinds = cast("tuple[OverlappedBackward, ...]", get_args(OverlappedBackward))
    return [kind for kind in kinds if kind in found]


def _lowering(
    schedule: Schedule, unsharded: Sequence[int], limit: int | None
) -> Callable[[Sequence[int]], LoweredSchedule]:
    """The schedule as it runs, which depends on the division where gathered bytes are limited."""
    if limit is None:
        always = lower(schedule, unshards=True, reduces=True)
        return lambda counts: always

    return lambda counts: lower(
        schedule,
        unshards=True,
        reduces=True,
        max_unsharded_bytes=limit,
        unsharded_bytes=dict(enumerate(map(sum, _by_stage(unsharded, counts)))),
    )


def _in_short(names: Sequence[str]) -> str:
    """Names, layers in a row as their first and last."""
    layers = [name for name in names if name.startswith(f"{TORCHTITAN_NAMING.layers}.")]
    if len(layers) < 3:
        return ", ".join(names)
    first, last = names.index(layers[0]), names.index(layers[-1])
    row = f"{layers[0]} to {layers[-1].rpartition('.')[2]}"
    return ", ".join([*names[:first], row, *names[last + 1 :]])
