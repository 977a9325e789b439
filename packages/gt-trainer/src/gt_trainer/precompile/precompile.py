"""Stored graphs for ranks that do not exist, made on a machine without their devices' number.

Every capture is that of one rank of torch's fake process group, in a child of its own: DTensor
keeps for a process what it found on its meshes. Which ranks capture, and what their captures say,
is decided as in a run (``artifacts.alike_ranks``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from gt_config import explain_difference
from gt_passes.simulation import Hardware
from gt_trace.artifacts.folder import ArtifactFolder
from gt_trace.artifacts.mesh_axes import MeshAxes
from gt_trace.artifacts.rank_differences import with_rules
from gt_trace.errors import ArtifactError
from gt_trainer.artifacts.alike_ranks import (
    NUM_ROUNDS,
    AlikeRanks,
    Judgement,
    RankGroup,
    groups_text,
    judge,
)
from gt_trainer.artifacts.graph_folder import Division, GraphFolder, at_places
from gt_trainer.artifacts.run_artifacts import artifact_folder
from gt_trainer.artifacts.run_identity import Machine, environment
from gt_trainer.artifacts.storable_graph import StoredGraph
from gt_trainer.dry_run.simulated_balance import balance_before_training, with_stages
from gt_trainer.launcher import run_in_child
from gt_trainer.parallelism_options import balance_of
from gt_trainer.placement.kept_plan import PLAN_FILE, plan_file_of, with_plan_file
from gt_trainer.placement.planned_machine import PlannedMachine, planned_for
from gt_trainer.precompile.alike_parts import AlikeParts, alike_parts
from gt_trainer.precompile.rank_capture import RankCapture, capture_as_rank
from gt_trainer.quantization.quantized_model import with_quantized_model
from gt_trainer.trainer import GraphTrainer

_MOST_PATHS = 5

CAPTURE_SECONDS = 3600.0
"""How long the capture of one rank may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecompileReport:
    """What was stored. ``str(report)`` says which ranks share a graph, and why."""

    folder: ArtifactFolder
    num_captures: int
    groups: tuple[RankGroup, ...]
    plan_file: Path | None = None
    """The plan that a solver found, for which the graphs are; None if it was given or none."""

    def __str__(self) -> str:
        """Lines for a terminal."""
        lines = [groups_text(self.groups), f"{self.num_captures} captures, in {self.folder.path}"]
        if self.plan_file is not None:
            lines.append(
                f"They are for the plan {self.plan_file}: start with "
                f"--compile.autoparallel_solver.plan {self.plan_file}"
            )
        return "\n".join(lines)


@dataclass(slots=True, kw_only=True)
class _Progress:
    captures: dict[tuple[int, int | None], RankCapture] = field(default_factory=dict)
    """By rank and stage."""

    groups: list[RankGroup] = field(default_factory=list)


def precompile(
    config: GraphTrainer.Config, world_size: int, *, hardware: Hardware | None = None
) -> PrecompileReport:
    """Capture and store the graphs of all ranks of a run, by as few captures as prove them.

    Args:
        config: a finished configuration that ``preflight`` accepts, with ``compile.artifacts``.
        world_size: number of ranks, none of which is started.
        hardware: the machine by which stages are balanced, and which plans are priced for, where
            that is asked for; H100 SXM by default.

    Raises:
        ChildFailedError: a capture failed; the text is its traceback.
        ArtifactError: a graph cannot be stored.
    """
    config = with_quantized_model(config)
    environment(Machine(device="cpu"))  # reads sources once, for all children
    with planned_for(PlannedMachine(hardware=hardware)):
        given = plan_file_of(config)
        config = _planned_by(_balanced(config, world_size, hardware), given)
        parts: tuple[AlikeParts, ...] = _in_child(partial(alike_parts, config, world_size))
        found = None
        if config.compile.autoparallel and given is None:
            found = Path(config.dump_folder) / PLAN_FILE  # which the first rank has written
            config = _planned_by(config, found)
        return replace(store_graphs(config, world_size, parts), plan_file=found)


def store_graphs(
    config: GraphTrainer.Config, world_size: int, parts: Sequence[AlikeParts]
) -> PrecompileReport:
    """Capture and store the graphs of ranks that seem alike.

    Args:
        config: as for ``precompile``; with a solver it names the file of the plan.
        world_size: as for ``precompile``.
        parts: of ``alike_parts``, all or some.

    Raises what ``precompile`` raises.
    """
    folder = artifact_folder(config.compile)
    assert folder is not None
    progress = _Progress()
    for part in parts:
        _settle(
            part.alike,
            part,
            capture=partial(_capture_once, progress, config, world_size, part),
            folder=folder,
            progress=progress,
            axes=(),
            reason=part.reason,
        )
    return PrecompileReport(
        folder=folder,
        num_captures=len(progress.captures),
        groups=tuple(progress.groups),
    )


def _balanced(
    config: GraphTrainer.Config, world_size: int, hardware: Hardware | None
) -> GraphTrainer.Config:
    """The configuration with its stages by name if they are to be balanced, as a run's is."""
    if balance_of(config.parallelism) == "layers":
        return config
    path = plan_file_of(config)
    if path is not None:
        # Imported here: no other run pays for the solver.
        from gt_trainer.pipelines.planned_stages import stages_of_plan

        return with_stages(config, stages_of_plan(path))
    found = _in_child(partial(balance_before_training, config, world_size, hardware=hardware))
    return with_stages(config, found.names_per_stage)


def _planned_by(config: GraphTrainer.Config, path: Path | None) -> GraphTrainer.Config:
    planned = copy.copy(config)
    planned.compile = with_plan_file(config.compile, path)
    return planned


def _settle(
    alike: AlikeRanks,
    part: AlikeParts,
    *,
    capture: Callable[[int], RankCapture],
    folder: ArtifactFolder,
    progress: _Progress,
    axes: tuple[str, ...],
    reason: str,
) -> None:
    """Store the graph of ranks that seem alike, or divide them.

    Args:
        alike: the ranks.
        part: what they capture; some of its ranks.
        capture: of one of them.
        folder: where to store.
        progress: what was found so far.
        axes: along which the ranks were divided already.
        reason: why.
    """
    found, judgement = _judged(alike, capture)
    first = found[alike.ranks[0]]
    graphs = GraphFolder(folder, axes=MeshAxes(coordinates=first.coordinates))
    identity = at_places(first.identity, axes, first.coordinates)
    if judgement.divided_by:
        why = "; ".join(map(str, judgement.examples))
        graphs.write_division(identity, Division(axes=judgement.divided_by, reason=why))
        for divided in alike.divided(judgement.divided_by):
            _settle(
                divided,
                part,
                capture=capture,
                folder=folder,
                progress=progress,
                axes=(*axes, *judgement.divided_by),
                reason=why,
            )
        return
    stored = StoredGraph(
        step=with_rules(first.stored.step, judgement.rules),
        documents=first.stored.documents,
        blobs=first.stored.blobs,
        rule_axes=tuple(judgement.rule_axes),
    )
    graphs.write_graph(identity, first.kind, stored)
    progress.groups.append(
        RankGroup(
            ranks=alike.ranks,
            captured_by=tuple(sorted(found)),
            num_rules=len(judgement.rules),
            rule_axes=tuple(judgement.rule_axes),
            reason=reason,
            part=part.name,
        )
    )


def _judged(
    alike: AlikeRanks, capture: Callable[[int], RankCapture]
) -> tuple[dict[int, RankCapture], Judgement]:
    """Captures of ranks that seem alike, as many as it takes, and what they say."""
    for round_number in range(NUM_ROUNDS):
        ranks = alike.witnesses(round_number)
        found = {rank: capture(rank) for rank in ranks}
        first = found[ranks[0]]
        for rank, each in found.items():
            # What was computed for all ranks from the first must be so on those looked at.
            differences = [each.path for each in explain_difference(first.identity, each.identity)]
            if differences or each.coordinates != alike.coordinates[rank]:
                raise ArtifactError(
                    f"ranks {ranks[0]} and {rank} cannot be stored for: they were thought alike, "
                    f"and differ in {', '.join(differences[:_MOST_PATHS]) or 'where they stand'}"
                )
        documents = {rank: each.stored.step for rank, each in found.items()}
        judgement = judge(alike, documents, round_number=round_number)
        if not judgement.needs_more:
            break
    return found, judgement


def _capture_once(
    progress: _Progress,
    config: GraphTrainer.Config,
    world_size: int,
    part: AlikeParts,
    rank: int,
) -> RankCapture:
    stage = part.stages.get(rank)
    if (rank, stage) not in progress.captures:
        progress.captures[rank, stage] = _in_child(
            partial(capture_as_rank, config, world_size, rank, stage)
        )
    return progress.captures[rank, stage]


def _in_child(function: Callable[[], Any]) -> Any:
    return run_in_child(function, timeout_seconds=CAPTURE_SECONDS)
