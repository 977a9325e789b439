"""Stored graphs for ranks that do not exist, made on a machine without their devices' number.

Every capture is that of one rank of torch's fake process group, in a child of its own: DTensor
keeps for a process what it found on its meshes. Which ranks capture, and what their captures say,
is decided as in a run (``artifacts.alike_ranks``). Ranks that hold other shapes than the first are
told apart by how their tensors are placed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.tools import utils as titan_utils

from gt_config import Fingerprint, explain_difference
from gt_trace.artifacts.folder import ArtifactFolder
from gt_trace.artifacts.mesh_axes import MeshAxes
from gt_trace.artifacts.rank_differences import with_rules
from gt_trace.errors import ArtifactError
from gt_trainer._torch_internals import local_shape_at, process_group_named
from gt_trainer.artifacts.alike_ranks import (
    AlikeRanks,
    Judgement,
    RankGroup,
    groups_text,
    judge,
)
from gt_trainer.artifacts.graph_folder import Division, GraphFolder, at_places
from gt_trainer.artifacts.run_artifacts import RunArtifacts, artifact_folder
from gt_trainer.artifacts.run_identity import Machine, RunSettings, environment, topology_of_run
from gt_trainer.artifacts.storable_graph import StoredGraph
from gt_trainer.dry_run.fake_step import FakeStep, fake_step
from gt_trainer.launcher import run_in_child
from gt_trainer.quantization.quantized_model import with_quantized_model
from gt_trainer.startup import StartupClock
from gt_trainer.steps.captured_microbatches import StoredAccumulation, capture_accumulation
from gt_trainer.steps.captured_step import capture_training_step
from gt_trainer.steps.recipe import passes_of, recipe_of
from gt_trainer.steps.second_groups import create_second_groups
from gt_trainer.steps.stored_step import StoredTrainingStep
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

    def __str__(self) -> str:
        """Lines for a terminal."""
        captures = f"{self.num_captures} ranks captured, into {self.folder.path}"
        return f"{groups_text(self.groups)}\n{captures}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankCapture:
    """What one rank captured, as data that a child can hand over."""

    identity: Fingerprint
    kind: str
    stored: StoredGraph
    coordinates: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _World:
    """All ranks, as the first one knows them."""

    coordinates: Mapping[int, Mapping[str, int]]
    local_shapes: Mapping[int, tuple[tuple[int, ...], ...]]
    """Of what is split unevenly somewhere, on each rank."""


@dataclass(slots=True, kw_only=True)
class _Progress:
    captures: dict[int, _RankCapture] = field(default_factory=dict)
    groups: list[RankGroup] = field(default_factory=list)


def precompile(config: GraphTrainer.Config, world_size: int) -> PrecompileReport:
    """Capture and store the graphs of all ranks of a run, by as few captures as prove them.

    Args:
        config: a finished configuration that ``preflight`` accepts, with ``compile.artifacts``,
            and without a pipeline.
        world_size: number of ranks, none of which is started.

    Raises:
        ChildFailedError: a capture failed; the text is its traceback.
        ArtifactError: a graph cannot be stored.
    """
    config = with_quantized_model(config)
    folder = artifact_folder(config.compile)
    assert folder is not None
    environment(Machine(device="cpu"))  # reads sources once, for all children
    world: _World = _in_child(partial(_world, config, world_size))
    progress = _Progress()
    classes: dict[object, dict[int, Mapping[str, int]]] = {}
    for rank, shapes in world.local_shapes.items():
        classes.setdefault(shapes, {})[rank] = world.coordinates[rank]
    for ranks in classes.values():
        reason = "their tensors have other shapes" if progress.groups else ""
        _settle(
            AlikeRanks(coordinates=ranks),
            capture=partial(_capture_once, progress, config, world_size),
            folder=folder,
            progress=progress,
            axes=(),
            reason=reason,
        )
    return PrecompileReport(
        folder=folder,
        num_captures=len(progress.captures),
        groups=tuple(sorted(progress.groups, key=lambda group: group.ranks)),
    )


def _settle(
    alike: AlikeRanks,
    *,
    capture: Callable[[int], _RankCapture],
    folder: ArtifactFolder,
    progress: _Progress,
    axes: tuple[str, ...],
    reason: str,
) -> None:
    """Store the graph of ranks that seem alike, or divide them.

    Args:
        alike: the ranks.
        capture: of one of them.
        folder: where to store.
        progress: what was found so far.
        axes: along which the ranks were divided already.
        reason: why.
    """
    found, judgement = _judged(alike, alike.first_two, capture, has_all_witnesses=False)
    if judgement.needs_more:
        found, judgement = _judged(alike, alike.telling, capture, has_all_witnesses=True)
    first = found[alike.ranks[0]]
    graphs = GraphFolder(folder, axes=MeshAxes(coordinates=first.coordinates))
    identity = at_places(first.identity, axes, first.coordinates)
    if judgement.divided_by:
        why = "; ".join(map(str, judgement.examples))
        graphs.write_division(identity, Division(axes=judgement.divided_by, reason=why))
        for part in alike.divided(judgement.divided_by):
            _settle(
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
    )
    graphs.write_graph(identity, first.kind, stored)
    progress.groups.append(
        RankGroup(
            ranks=alike.ranks,
            captured_by=tuple(sorted(found)),
            num_rules=len(judgement.rules),
            rule_axes=tuple(sorted({rule.axis for rule in judgement.rules.values()})),
            reason=reason,
        )
    )


def _judged(
    alike: AlikeRanks,
    ranks: tuple[int, ...],
    capture: Callable[[int], _RankCapture],
    *,
    has_all_witnesses: bool,
) -> tuple[dict[int, _RankCapture], Judgement]:
    found = {rank: capture(rank) for rank in ranks}
    first = found[ranks[0]]
    for rank, each in found.items():
        # What was computed for all ranks from the first must be so on those that are looked at.
        differences = [each.path for each in explain_difference(first.identity, each.identity)]
        if differences or each.coordinates != alike.coordinates[rank]:
            raise ArtifactError(
                f"ranks {ranks[0]} and {rank} cannot be stored for: they were thought alike, and "
                f"differ in {', '.join(differences[:_MOST_PATHS]) or 'where they stand'}"
            )
    documents = {rank: each.stored.step for rank, each in found.items()}
    return found, judge(alike, documents, has_all_witnesses=has_all_witnesses)


def _capture_once(
    progress: _Progress, config: GraphTrainer.Config, world_size: int, rank: int
) -> _RankCapture:
    if rank not in progress.captures:
        progress.captures[rank] = _in_child(partial(_capture, config, world_size, rank))
    return progress.captures[rank]


def _in_child(function: Callable[[], Any]) -> Any:
    return run_in_child(function, timeout_seconds=CAPTURE_SECONDS)


def _capture(config: GraphTrainer.Config, world_size: int, rank: int) -> _RankCapture:
    """In a child: capture as ``rank``."""
    with fake_step(config, world_size, rank=rank) as step:
        artifacts = _artifacts(config, step)
        options = config.compile
        is_cut = options.accumulation == "reduce_once"
        clock = StartupClock()
        axes = artifacts.axes(step.model)
        trace: dict[str, Any] = {
            "ep_overlap": options.ep_overlap,
            "capture_layers": options.capture_layers,
            "meta_device": step.meta_device,
        }
        num_microbatches = artifacts.settings.topology.gradient_accumulation_steps if is_cut else 1
        identity = artifacts.identity(
            passes=artifacts.passes_of("MICROBATCH" if is_cut else "STEP"),
            model=step.model,
            loss_fn=step.loss_fn,
            arguments=step.inputs,
            num_microbatches=num_microbatches,
        )
        trace["recipe"] = recipe_of(
            options, reshard_after_forward=config.parallelism.fsdp_reshard_after_forward
        )
        fits: dict[str, Any] = {"model": step.model, "axes": axes, "clock": clock}
        graph: StoredAccumulation | StoredTrainingStep
        if is_cut:
            microbatches = capture_accumulation(
                step.model,
                step.loss_fn,
                *step.inputs,
                num_microbatches=num_microbatches,
                clock=clock,
                until_code=True,
                **trace,
            )
            graph = StoredAccumulation(trace=lambda: microbatches, **fits)
            stored = graph.encode(microbatches)
        else:
            report = capture_training_step(
                step.model, step.loss_fn, *step.inputs, clock=clock, until_code=True, **trace
            )
            graph = StoredTrainingStep(trace=lambda: report, **fits)
            stored = graph.encode(report)
        return _RankCapture(
            identity=identity,
            kind=graph.kind,
            stored=StoredGraph(
                step=json.loads(json.dumps(stored.step)),
                documents=dict(stored.documents),
                blobs=dict(stored.blobs),
            ),
            coordinates=dict(axes.coordinates),
        )


def _artifacts(config: GraphTrainer.Config, step: FakeStep) -> RunArtifacts:
    folder = artifact_folder(config.compile)
    assert folder is not None
    assert config.model_spec is not None
    torch.use_deterministic_algorithms(
        config.debug.deterministic, warn_only=config.debug.deterministic_warn_only
    )
    return RunArtifacts(
        folder=folder,
        settings=RunSettings(
            compile=config.compile,
            topology=topology_of_run(step.parallel_dims, config.training, config.parallelism),
            model=config.model_spec.model,
            loss=config.loss,
            parallelism=config.parallelism,
            training=config.training,
            debug=config.debug,
            machine=Machine.here(titan_utils.device_type),
        ),
        parallel_dims=step.parallel_dims,
        second_groups=create_second_groups(config.compile, step.parallel_dims),
        device=torch.device("cpu"),
        passes_of=partial(
            passes_of,
            config.compile,
            reshard_after_forward=config.parallelism.fsdp_reshard_after_forward,
        ),
    )


def _world(config: GraphTrainer.Config, world_size: int) -> _World:
    """In a child, as the first rank: where all ranks stand, and what they hold otherwise."""
    with fake_step(config, world_size) as step:
        axes = _artifacts(config, step).axes(step.model)
        steps = {label: _stride(axes, label) for label in axes.coordinates}
        coordinates = {
            rank: {label: rank // steps[label] % axes.sizes[label] for label in steps}
            for rank in range(world_size)
        }
        uneven = list(_uneven(step.model, axes))
        return _World(
            coordinates=coordinates,
            local_shapes={
                rank: tuple(
                    local_shape_at(tensor, [at[label] for label in labels])
                    for tensor, labels in uneven
                )
                for rank, at in coordinates.items()
            },
        )


def _stride(axes: MeshAxes, label: str) -> int:
    """How far apart neighbours along an axis are; the first rank stands at the start of each."""
    ranks = dist.get_process_group_ranks(process_group_named(axes.group(label)))
    stride = ranks[1] if len(ranks) > 1 else 1
    assert ranks == [n * stride for n in range(len(ranks))], f"axis {label} is irregular: {ranks}"
    return stride


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
