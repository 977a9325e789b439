"""How many graphs ranks need: ``python -m artifacts.rank_groups WORKLOAD [STAGE ...]``.

No rank exists: witnesses capture one after another, each in a child, and documents are compared as
in a run (``gt_trainer.artifacts.alike_ranks``). Of a pipeline each distinct stage is looked at, or
those that are named, on the pipeline rank that holds it. Prints one line of JSON: by graph, numbers
of groups, ranks and captures, and the groups with their reasons.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import resource
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from gt_trainer import device

device.install("cpu")  # before the imports below, whose modules copy their device

import torch  # noqa: E402
from artifacts.grouped_workloads import GROUPED, WORLD_SIZE  # noqa: E402
from torch import nn  # noqa: E402

from gt_config import Fingerprint  # noqa: E402
from gt_trace.artifacts.folder import ArtifactFolder  # noqa: E402
from gt_trainer import precompile as precompiling  # noqa: E402
from gt_trainer.artifacts.alike_ranks import AlikeRanks, RankGroup, groups_text  # noqa: E402
from gt_trainer.artifacts.run_artifacts import RunArtifacts  # noqa: E402
from gt_trainer.artifacts.run_identity import environment  # noqa: E402
from gt_trainer.artifacts.shared_capture import SharedGraph  # noqa: E402
from gt_trainer.artifacts.storable_graph import StoredGraph  # noqa: E402
from gt_trainer.dry_run.equal_stages import equal_stages  # noqa: E402
from gt_trainer.dry_run.fake_pipeline import capture_stages, planned_pipeline  # noqa: E402
from gt_trainer.dry_run.fake_step import MetaModel, fake_ranks, meta_model  # noqa: E402
from gt_trainer.pipelines.pipeline_plan import PipelinePlan  # noqa: E402
from gt_trainer.pipelines.split_model import placed_stages  # noqa: E402

__all__ = ["groups_of_stages", "main"]


def main(workload: str, *stages: str) -> None:
    """Print what was found."""
    module, name = GROUPED[workload]
    config = getattr(importlib.import_module(f"gt_trainer.models.{module}"), name)()
    with tempfile.TemporaryDirectory() as folder:
        config.compile = dataclasses.replace(config.compile, artifacts=folder)
        if config.parallelism.pipeline_parallel_degree > 1:
            found = groups_of_stages(config, WORLD_SIZE, list(map(int, stages)) or None)
        else:
            found = {"step": precompiling.precompile(config, WORLD_SIZE).groups}
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    record = {
        "cpu_seconds": sum(each.ru_utime + each.ru_stime for each in usage),
        "graphs": {
            graph: {
                "groups": len(groups),
                "ranks": sum(len(each.ranks) for each in groups),
                "captures": sum(len(each.captured_by) for each in groups),
                "text": " ".join(groups_text(groups).split()),
            }
            for graph, groups in found.items()
        },
    }
    sys.stdout.write(json.dumps(record) + "\n")


def groups_of_stages(
    config: Any, world_size: int, stages: Sequence[int] | None = None
) -> dict[str, tuple[RankGroup, ...]]:
    """Which ranks share the graphs of a stage, by stage and the stages that are like it.

    Args:
        config: a finished configuration of a pipeline; ``compile.artifacts`` is a folder.
        world_size: number of ranks, none of which is started.
        stages: to look at; None: each distinct one.
    """
    environment(precompiling.Machine(device="cpu"))  # reads sources once, for all children
    world: _PipelineWorld = precompiling._in_child(partial(_world, config, world_size, stages))
    found = {}
    for stage, ranks in world.ranks.items():
        progress = precompiling._Progress()
        classes: dict[object, dict[int, Mapping[str, int]]] = {}
        for rank in ranks:
            shapes = world.local_shapes[stage][rank]
            classes.setdefault(shapes, {})[rank] = world.coordinates[rank]
        for members in classes.values():
            precompiling._settle(
                AlikeRanks(coordinates=members),
                capture=partial(_captured_once, progress, config, world_size, stage),
                folder=ArtifactFolder(Path(config.compile.artifacts), max_bytes=None),
                progress=progress,
                axes=(),
                reason="their tensors have other shapes" if progress.groups else "",
            )
        found[_named(world.like[stage])] = tuple(progress.groups)
    return found


def _named(stages: Sequence[int]) -> str:
    first, last = stages[0], stages[-1]
    return f"stage {first}" if first == last else f"stages {first}-{last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _PipelineWorld:
    """All ranks, as the first one knows them."""

    coordinates: Mapping[int, Mapping[str, int]]
    ranks: Mapping[int, tuple[int, ...]]
    """Those that hold a stage, by stage."""

    local_shapes: Mapping[int, Mapping[int, object]]
    """Of what is split unevenly in a stage, on each of its ranks."""

    like: Mapping[int, tuple[int, ...]]
    """The stages that a looked-at one stands for, itself included."""


def _world(config: Any, world_size: int, stages: Sequence[int] | None) -> _PipelineWorld:
    with _pipeline(config, world_size, rank=0) as (built, plan):
        like = equal_stages(plan.names_per_stage, config.model_spec.model.layers)
        chosen = sorted(set(like)) if stages is None else sorted(stages)
        parts = placed_stages(
            built.model,
            plan,
            chosen,
            all_indices=chosen,
            parallel_dims=built.parallel_dims,
            training=config.training,
            parallelism=config.parallelism,
            compile_config=config.compile,
            ac_config=config.activation_checkpoint,
            dump_folder=config.dump_folder,
        )
        artifacts = _artifacts(config, built)
        coordinates: dict[int, Mapping[str, int]] = {}
        ranks, shapes = {}, {}
        for stage, part in parts.items():
            axes = artifacts.axes(part)
            strides = {label: precompiling._stride(axes, label) for label in axes.coordinates}
            for rank in range(world_size):
                coordinates[rank] = {
                    label: rank // stride % axes.sizes[label] for label, stride in strides.items()
                }
            place = plan.schedule.stage_to_rank[stage]
            ranks[stage] = tuple(r for r, at in coordinates.items() if at["pp"] == place)
            uneven = list(precompiling._uneven(part, axes))
            shapes[stage] = {
                rank: tuple(
                    precompiling.local_shape_at(tensor, [coordinates[rank][a] for a in labels])
                    for tensor, labels in uneven
                )
                for rank in ranks[stage]
            }
        return _PipelineWorld(
            coordinates=coordinates,
            ranks=ranks,
            local_shapes=shapes,
            like={s: tuple(i for i, first in enumerate(like) if first == like[s]) for s in chosen},
        )


def _captured_once(
    progress: Any, config: Any, world_size: int, stage: int, rank: int
) -> precompiling._RankCapture:
    if rank not in progress.captures:
        capture = partial(_capture, config, world_size, stage, rank)
        progress.captures[rank] = precompiling._in_child(capture)
    return progress.captures[rank]


def _capture(config: Any, world_size: int, stage: int, rank: int) -> precompiling._RankCapture:
    """In a child: capture a stage as one of the ranks that hold it."""
    with _pipeline(config, world_size, rank=rank) as (built, plan):
        artifacts = _artifacts(config, built)
        capture_stages(config, built, plan, [stage], artifacts=artifacts)
        (recorded,) = artifacts.recorded
        return recorded


@contextmanager
def _pipeline(
    config: Any, world_size: int, *, rank: int
) -> Iterator[tuple[MetaModel, PipelinePlan]]:
    with fake_ranks(world_size, rank=rank):
        built = meta_model(config, world_size)
        yield built, planned_pipeline(config)


def _artifacts(config: Any, built: MetaModel) -> _Recording:
    of_step: Any = precompiling._artifacts(config, built)
    facts = {each.name: getattr(of_step, each.name) for each in dataclasses.fields(of_step)}
    return _Recording(**facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recording(RunArtifacts):
    """Has every graph captured, and keeps what would be stored of it."""

    recorded: list[precompiling._RankCapture] = field(default_factory=list)

    def obtain(
        self, graph: Any, *, model: nn.Module, is_first: bool, **facts: Any
    ) -> SharedGraph[Any]:
        """See ``RunArtifacts``."""
        identity: Fingerprint = self.identity(model=model, **facts)
        captured = graph.capture()
        stored = graph.encode(captured)
        self.recorded.append(
            precompiling._RankCapture(
                identity=identity,
                kind=graph.kind,
                stored=StoredGraph(
                    step=json.loads(json.dumps(stored.step)),
                    documents=dict(stored.documents),
                    blobs=dict(stored.blobs),
                ),
                coordinates=dict(self.axes(model).coordinates),
            )
        )
        return SharedGraph(
            captured=captured, identity=identity, loaded_from=None, is_lowest=False, groups=()
        )

    def generating_code(self, shared: object, *, model: nn.Module) -> Any:
        """No code is generated of what nobody runs."""
        return nullcontext()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
