"""Simulates captured training steps, with a pipeline and without one.

Four levels: an operator is priced by a roofline, a graph runs on streams, a schedule puts the
graphs of all pipeline ranks in time, and the step adds the optimizer. Each takes its tasks from
what the level below captured. Data-dependent sizes of token exchanges are those of balanced
routing.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torchtitan.distributed import ParallelDims

from gt_passes.simulation import (
    CostModel,
    GraphProgram,
    Hardware,
    HostModel,
    Sensitivity,
    SymbolSizes,
    balanced_exchange_sizes,
    h100_sxm,
    sensitivity,
    simulate_step,
    write_perfetto_trace,
)
from gt_pipeline.estimates import (
    ADAM_STATES,
    GraphRuns,
    PipelineTime,
    PricedStages,
    RankMemory,
    graph_memory,
    pipeline_time,
    rank_memory,
    symbol_sizes_of,
)
from gt_pipeline.graph import GraphPipelineStage
from gt_pipeline.runner.shared_parameters import find_members
from gt_pipeline.schedules import Schedule, lower, simulate, write_chrome_trace
from gt_pipeline.schedules.timeline_page import timelines_page
from gt_pipeline.split import SharedGroup
from gt_trainer.device_transfer import local_part
from gt_trainer.dry_run.simulated_step import SimulatedSchedule, SimulatedStep
from gt_trainer.dry_run.step_facts import StepFacts
from gt_trainer.pipelines.pipeline_plan import ranks_of_pipelines
from gt_trainer.steps.program import ProgramGraph

_AXIS_LABELS = {
    "tp": "tensor parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
    "fsdp": "data parallel",
    "dp_shard": "data parallel",
    "dp_replicate": "data parallel (replicas)",
    "efsdp": "data parallel (experts)",
    "pp": "pipeline",
}


def simulate_graphs(
    graphs: Sequence[ProgramGraph],
    facts: StepFacts,
    *,
    labels: Mapping[str, str],
    hardware: Hardware | None = None,
    host: HostModel = "eager",
    attention_note: str | None = None,
    trace_path: Path | None = None,
) -> SimulatedStep:
    """Simulate a training step without a pipeline.

    Args:
        graphs: the graph of every microbatch, or the graphs of microbatches that share gathering
            and reduction; after passes.
        facts: what the configuration says of the step.
        labels: purposes of process groups by their names, as of ``group_labels``.
        hardware: the machine; H100 SXM by default.
        host: whether Python issues operator after operator, or CUDA graphs replay them.
        attention_note: as for ``SimulatedStep``.
        trace_path: path of a Perfetto trace of the fullest graph; None writes none.
    """
    machine = hardware or h100_sxm()
    programs: list[tuple[GraphProgram, CostModel]] = []
    runs: list[GraphRuns] = []
    for each in graphs:
        sizes = SymbolSizes(balanced_exchange_sizes(each.graph_module))
        cost_model = CostModel(machine, sizes=sizes, host=host)
        program = GraphProgram(each.graph_module, cost_model)
        simulation = simulate_step(
            each.graph_module,
            cost_model,
            group_labels=labels,
            num_static_inputs=each.context.num_static_inputs,
            released_inputs=each.released_inputs,
            input_kinds=each.input_kinds,
            program=program,
        )
        count = facts.num_microbatches - len(graphs) + 1 if each.is_repeated else 1
        programs.append((program, cost_model))
        runs.append(GraphRuns(graph=simulation, graph_module=each.graph_module, count=count))

    def graphs_us(on: Hardware) -> float:
        times = (
            program.run(cost_model.with_hardware(on)).timeline.makespan_us
            for program, cost_model in programs
        )
        return sum(each.count * us for each, us in zip(runs, times, strict=True))

    fullest = max((each.graph for each in runs), key=lambda graph: graph.memory.peak_bytes)
    # Microbatches that share have their sums in their graphs.
    is_added = facts.num_microbatches > 1 and len(graphs) == 1
    if trace_path is not None:
        write_perfetto_trace(fullest, trace_path)
    return SimulatedStep(
        facts=facts,
        hardware=machine,
        runs=tuple(runs),
        sensitivity=_sensitivity(graphs_us, facts, machine),
        memory=(
            graph_memory(
                fullest.memory,
                optimizer_bytes=ADAM_STATES * facts.parameter_bytes_per_rank,
                accumulated_bytes=facts.parameter_bytes_per_rank if is_added else 0,
            ),
        ),
        memory_at_us=fullest.memory_at_us,
        num_unsized=sum(each.graph.memory.num_unsized for each in runs),
        attention_note=attention_note,
        trace_path=trace_path,
    )


def simulate_stages(
    stages: Sequence[GraphPipelineStage],
    schedule: Schedule,
    facts: StepFacts,
    *,
    labels: Mapping[str, str],
    hardware: Hardware | None = None,
    host: HostModel = "eager",
    max_unsharded_bytes: int | None = None,
    shared_groups: Sequence[SharedGroup] = (),
    trace_path: Path | None = None,
    page_path: Path | None = None,
) -> SimulatedStep:
    """Simulate the training step of a pipeline.

    Args:
        stages: for each stage the one that was captured for it.
        schedule: of the whole pipeline.
        facts: what the configuration says of the step; its microbatches are runs of the schedule.
        labels: as for ``simulate_graphs``; pipeline ranks are the outermost axis.
        hardware: as for ``simulate_graphs``.
        host: as for ``simulate_graphs``.
        max_unsharded_bytes: as for ``lower``.
        shared_groups: parameters that are one across stages.
        trace_path: path of a Perfetto trace of the schedule; None writes none.
        page_path: path of an HTML page of the schedule; None writes none.
    """
    machine = hardware or h100_sxm()
    cost_model = CostModel(machine, sizes=SymbolSizes(symbol_sizes_of(stages)), host=host)
    ranks, *_ = ranks_of_pipelines(schedule.num_ranks, facts.num_gpus)
    priced = PricedStages(stages, schedule, cost_model, ranks=ranks, group_labels=labels)
    lowered = lower(
        schedule,
        unshards=True,
        reduces=True,
        max_unsharded_bytes=max_unsharded_bytes,
        unsharded_bytes={index: stage.unsharded_bytes for index, stage in enumerate(stages)},
    )
    costs = priced.costs()
    time = pipeline_time(lowered, costs)
    exchanges = _exchanges(stages, shared_groups, [ranks[r] for r in schedule.stage_to_rank])

    def shared_us(model: CostModel) -> float:
        return sum(model.collective_us("all_gather", size, at) for size, at in exchanges)

    def schedules_us(on: Hardware) -> float:
        model = cost_model.with_hardware(on)
        makespan = simulate(lowered, priced.costs(model)).makespan
        return facts.num_microbatches * (makespan + shared_us(model))

    memory = tuple(
        rank_memory(
            lowered,
            rank=rank,
            stages=priced.memory,
            pair=priced.pair_memory,
            accumulates=facts.num_microbatches > 1,
        )
        for rank in range(schedule.num_ranks)
    )
    runs = priced.runs(lowered)
    if trace_path is not None:
        write_chrome_trace(time.timeline.spans, trace_path)
    if page_path is not None:
        in_ms = simulate(lowered, lambda action: costs(action) / 1000)
        page_path.parent.mkdir(parents=True, exist_ok=True)
        page_path.write_text(timelines_page([in_ms]), encoding="utf-8")
    return SimulatedStep(
        facts=facts,
        hardware=machine,
        runs=runs,
        schedule=SimulatedSchedule(
            lowered=lowered, time=time, shared_us=shared_us(cost_model), page_path=page_path
        ),
        sensitivity=_sensitivity(schedules_us, facts, machine),
        memory=memory,
        memory_at_us=_moments_us(time, max(memory, key=lambda each: each.peak_bytes)),
        num_unsized=priced.num_unsized,
        trace_path=trace_path,
    )


def group_labels(parallel_dims: ParallelDims) -> dict[str, str]:
    """Return the purpose of each process group. Mesh axes over the same ranks share a group."""
    labels: dict[str, str] = {}
    for axis, mesh in parallel_dims.get_all_one_dimensional_meshes().items():
        label = _AXIS_LABELS.get(axis)
        if label is None:
            continue
        name = mesh.get_group().group_name
        labels[name] = f"{labels[name]}, {label}" if name in labels else label
    return labels


def _sensitivity(
    graphs_us: Callable[[Hardware], float], facts: StepFacts, machine: Hardware
) -> Sensitivity:
    return sensitivity(lambda on: graphs_us(on) + facts.optimizer_us(on), machine)


def _exchanges(
    stages: Sequence[GraphPipelineStage],
    groups: Sequence[SharedGroup],
    rank_of_stage: Sequence[int],
) -> list[tuple[int, list[int]]]:
    """Return the bytes that ``SharedParameter`` gathers, and the global ranks with copies."""
    # Stages that are alike share one capture, whose names are those of the stage it was made of;
    # none of them holds what is shared, for they are neither first nor last.
    members = find_members(
        groups,
        {index: tuple(stage.parameters()) for index, stage in enumerate(stages)},
        dict(enumerate(rank_of_stage)),
    )
    found = []
    for copies in members:
        of_rank = Counter(each.rank for each in copies)
        if len(of_rank) == 1:
            continue
        local = local_part(stages[copies[0].stage].parameters()[copies[0].name])
        num_bytes = local.numel() * local.element_size()
        found.append((num_bytes * len(of_rank) * max(of_rank.values()), sorted(of_rank)))
    return found


def _moments_us(time: PipelineTime, memory: RankMemory) -> tuple[float, ...]:
    """The time of each moment of a rank; those that no action of the schedule has are at its end.

    They are reductions that are waited for, and the optimizer.
    """
    starts = [
        span.start
        for span in time.timeline.spans
        if span.rank == memory.rank
        and (span.action.is_compute or span.action.kind in ("UNSHARD", "REDUCE_GRAD"))
    ]
    starts += [time.makespan] * (len(memory.moments) - len(starts))
    return tuple(itertools.accumulate(starts, max))
