"""Stored graphs for ranks that do not exist, made on a machine without their devices' number.

Every capture runs as one rank of torch's fake process group, in a separate child: DTensor caches
per process what it found on its meshes. Which ranks capture, and what their captures prove,
is decided as in a run (``artifacts.alike_ranks``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from gt_config import explain_difference
from gt_passes.simulation import Hardware
from gt_trace.artifacts.folder import ArtifactFolder
from gt_trace.artifacts.mesh_axes import MeshAxes
from gt_trace.artifacts.rank_differences import compare_documents, with_rules
from gt_trace.errors import ArtifactError
from gt_trainer._torch_internals import local_shape_at, process_group_named
from gt_trainer.artifacts.alike_ranks import (
    PIPELINE_AXIS,
    AlikeRanks,
    Coordinates,
    RankGroup,
    groups_text,
    spans,
)
from gt_trainer.artifacts.graph_folder import GraphFolder, OwnGraphs, at_places
from gt_trainer.artifacts.run_artifacts import artifact_folder
from gt_trainer.artifacts.run_identity import Machine, environment
from gt_trainer.dry_run.simulated_balance import balance_before_training, with_stages
from gt_trainer.launcher import run_in_child
from gt_trainer.parallelism_options import balance_of
from gt_trainer.placement.kept_plan import PLAN_FILE, plan_file_of, with_plan_file
from gt_trainer.placement.planned_machine import PlannedMachine, planned_for
from gt_trainer.precompile.rank_capture import (
    RankCapture,
    capture_as_rank,
    parts_to_capture,
)
from gt_trainer.quantization.quantized_model import with_quantized_model
from gt_trainer.trainer import GraphTrainer

_MOST_PATHS = 5

CAPTURE_SECONDS = 3600.0
"""How long the capture of one rank may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecompileReport:
    """The stored graphs. ``str(report)`` lists which ranks share a graph, and why."""

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


def precompile(
    config: GraphTrainer.Config, world_size: int, *, hardware: Hardware | None = None
) -> PrecompileReport:
    """Capture and store the graphs of all ranks of a run, by as few captures as prove them.

    Args:
        config: a finished configuration that ``preflight`` accepts, with ``compile.artifacts``.
        world_size: number of ranks, none of which is started.
        hardware: the machine for which stages are balanced and plans are priced; H100 SXM by
            default.

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
    captures: dict[tuple[int, int | None], RankCapture] = {}
    """Captures by rank and stage."""

    def capture(part: AlikeParts, rank: int) -> RankCapture:
        key = (rank, part.stages.get(rank))
        if key not in captures:
            captures[key] = _in_child(partial(capture_as_rank, config, world_size, *key))
        return captures[key]

    groups = tuple(_stored_part(part, partial(capture, part), folder) for part in parts)
    return PrecompileReport(folder=folder, num_captures=len(captures), groups=groups)


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


def _stored_part(
    part: AlikeParts, capture: Callable[[int], RankCapture], folder: ArtifactFolder
) -> RankGroup:
    """Store the graph of ranks that seem alike, or the graph of each.

    Args:
        part: the ranks, and what they capture.
        capture: captures as one of them.
        folder: where to store.
    """
    found = {rank: capture(rank) for rank in part.alike.witnesses}
    _check_alike(part, found)
    first = found[part.alike.ranks[0]]
    graphs = GraphFolder(folder, axes=MeshAxes(coordinates=first.coordinates))
    documents = {rank: each.stored.step for rank, each in found.items()}
    comparison = compare_documents(documents, part.alike.coordinates)
    group = RankGroup(
        ranks=part.alike.ranks,
        captured_by=tuple(found),
        num_rules=len(comparison.rules),
        rule_axes=comparison.rule_axes,
        reason=part.reason,
        part=part.name,
    )
    if not comparison.unruled:
        stored = replace(
            first.stored,
            step=with_rules(first.stored.step, comparison.rules),
            rule_axes=comparison.rule_axes,
        )
        graphs.write_graph(first.identity, first.kind, stored)
        return group
    reason = comparison.reason()
    graphs.write_own_graphs(first.identity, OwnGraphs(reason=reason))
    for rank in part.alike.ranks:
        own = capture(rank)
        _check_alike(part, {part.alike.ranks[0]: first, rank: own})
        at_own_place = at_places(own.identity, tuple(own.coordinates), own.coordinates)
        graphs.write_graph(at_own_place, own.kind, own.stored)
    return replace(
        group,
        captured_by=part.alike.ranks,
        is_shared=False,
        num_rules=0,
        rule_axes=(),
        reason=reason,
    )


def _check_alike(part: AlikeParts, found: Mapping[int, RankCapture]) -> None:
    """Check that what was computed for all ranks from the first is so on those that captured.

    Raises:
        ArtifactError: a rank has another fingerprint or place.
    """
    origin, *_ = found
    for rank, each in found.items():
        differences = [
            each.path for each in explain_difference(found[origin].identity, each.identity)
        ]
        if differences or each.coordinates != part.alike.coordinates[rank]:
            raise ArtifactError(
                f"ranks {origin} and {rank} cannot be stored for: they were thought alike, and "
                f"differ in {', '.join(differences[:_MOST_PATHS]) or 'where they stand'}"
            )


def _in_child(function: Callable[[], Any]) -> Any:
    return run_in_child(function, timeout_seconds=CAPTURE_SECONDS)


# Which ranks of a run that nobody has started seem alike, each with what it captures.
#
# All are found from the first rank: it places every stage of a pipeline on its own meshes, since
# other pipeline ranks hold other stages over meshes of the same shape. Ranks that hold other
# shapes are told apart by how tensors are placed, and stages by what would identify their
# graphs.
@dataclass(frozen=True, slots=True, kw_only=True)
class AlikeParts:
    """Ranks of which nothing is known in which their graphs of some part of the model differ."""

    alike: AlikeRanks
    stages: Mapping[int, int]
    """Which stage of a pipeline each rank would capture; empty without a pipeline."""

    reason: str
    """Why these ranks are apart from the first; "" of those."""

    @property
    def name(self) -> str:
        """What part of the model it is; "" of the whole."""
        found = sorted({*self.stages.values()})
        if not found:
            return ""
        return f"stage{'s' if len(found) > 1 else ''} {', '.join(spans(found))}"


def alike_parts(config: GraphTrainer.Config, world_size: int) -> tuple[AlikeParts, ...]:
    """In a process without a group, which becomes the first rank: what all ranks would capture.

    Args:
        config: a finished configuration that ``preflight`` accepts.
        world_size: number of ranks, none of which is started.
    """
    with parts_to_capture(config, world_size) as to_capture:
        artifacts, schedule = to_capture.artifacts, to_capture.schedule
        found: dict[tuple[str, object], dict[int, Coordinates]] = {}
        stages: dict[tuple[str, object], dict[int, int]] = {}
        for index, program in to_capture.programs.items():
            identity = "" if index is None else artifacts.identity(program).digest
            places = _places(program.axes, world_size)
            for rank, shapes in _shapes(program.asked.model, program.axes, places).items():
                key, at = (identity, shapes), places[rank]
                if index is None or schedule is None:
                    found.setdefault(key, {})[rank] = at
                elif index in schedule.stages_of_rank(at[PIPELINE_AXIS]):
                    found.setdefault(key, {})[rank] = at
                    stages.setdefault(key, {}).setdefault(rank, index)
    parts: list[AlikeParts] = []
    known: set[str] = set()
    for (identity, shapes), ranks in found.items():
        reason = "their tensors have other shapes" if identity in known else ""
        if known and not reason:
            reason = "they hold another stage"
        known.add(identity)
        parts.append(
            AlikeParts(
                alike=AlikeRanks(coordinates=ranks, is_placed=config.compile.autoparallel),
                stages=stages.get((identity, shapes), {}),
                reason=reason,
            )
        )
    return tuple(parts)


def _places(axes: MeshAxes, world_size: int) -> dict[int, dict[str, int]]:
    """Where every rank stands, by what the first rank knows of its own meshes."""
    steps = {label: _stride(axes, label) for label in axes.coordinates}
    return {
        rank: {label: rank // steps[label] % axes.sizes[label] for label in steps}
        for rank in range(world_size)
    }


def _stride(axes: MeshAxes, label: str) -> int:
    """How far apart neighbours along an axis are; the first rank stands at the start of each."""
    ranks = dist.get_process_group_ranks(process_group_named(axes.group(label)))
    stride = ranks[1] if len(ranks) > 1 else 1
    assert ranks == [n * stride for n in range(len(ranks))], f"axis {label} is irregular: {ranks}"
    return stride


def _shapes(
    model: torch.nn.Module, axes: MeshAxes, places: Mapping[int, Coordinates]
) -> dict[int, Any]:
    """On each rank, the shapes of what is split unevenly somewhere."""
    uneven = list(_uneven(model, axes))
    return {
        rank: tuple(
            local_shape_at(tensor, [at[label] for label in labels]) for tensor, labels in uneven
        )
        for rank, at in places.items()
    }


def _uneven(model: torch.nn.Module, axes: MeshAxes) -> Iterator[tuple[DTensor, list[str]]]:
    """Parameters and buffers whose parts are of several shapes, one of each kind, and their axes.

    Their first and last parts differ, whatever torch's rule for the remainder.
    """
    seen: set[object] = set()
    for tensor in (*model.parameters(), *model.buffers()):
        if not isinstance(tensor, DTensor):
            continue
        mesh = tensor.device_mesh
        kind = (tensor.shape, tensor.placements, mesh)
        ends = ([0] * mesh.ndim, [size - 1 for size in mesh.shape])
        if kind in seen or len({local_shape_at(tensor, end) for end in ends}) == 1:
            continue
        seen.add(kind)
        yield (
            tensor,
            [axes.label_of_group(mesh.get_group(dim).group_name) for dim in range(mesh.ndim)],
        )
