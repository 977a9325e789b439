"""The stored graphs of one run: what its steps ask for one, whatever form of step they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from gt_config import CompileConfig, Fingerprint
from gt_passes.compilation.compiler_products import collected_products, reuse_products
from gt_trace.artifacts.folder import ArtifactFolder
from gt_trace.artifacts.mesh_axes import MeshAxes, meshes_of
from gt_trace.capture.module_state import collect_state
from gt_trace.capture.subclass_layout import flatten_tensor
from gt_trainer.artifacts.alike_ranks import groups_text
from gt_trainer.artifacts.graph_folder import GraphFolder, at_places
from gt_trainer.artifacts.rank_exchange import ALONE, RankExchange
from gt_trainer.artifacts.run_identity import RunSettings, step_identity
from gt_trainer.artifacts.shared_capture import SharedGraph, share_capture
from gt_trainer.artifacts.storable_graph import StorableGraph
from gt_trainer.placement.placed_parts import expert_groups

CapturedT = TypeVar("CapturedT")

_AXES = ("dp_replicate", "fsdp", "tp", "ep", "efsdp", "cp", "pp")
"""torchtitan's names of the axes over which a captured graph may communicate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunArtifacts:
    """Where a run takes its graphs from, and puts them.

    See ``--compile.artifacts``.
    """

    folder: ArtifactFolder
    settings: RunSettings
    parallel_dims: ParallelDims
    second_groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)
    """Process groups that are no axes, by labels that are the same on every rank."""

    device: torch.device
    """Where the process group communicates."""

    def obtain(self, graph: StorableGraph[CapturedT], *, is_first: bool) -> SharedGraph[CapturedT]:
        """A graph that was stored before, was captured by another rank, or is captured now.

        Logs which of these, and on the first rank which ranks share a graph, and why.

        Args:
            graph: how it is captured and stored, and what it depends on.
            is_first: whether all ranks of the run ask together. Later, ranks with other shapes
                may ask at other times: each then asks for itself.

        Raises:
            Exception: whatever the capture raises.
            CaptureFailedElsewhereError: the capture of another rank failed, or it could not say
                what its graph depends on.
            RankLostError: another rank has ended, or did not answer in time.
        """
        exchange = RankExchange(device=self.device) if is_first else ALONE
        identity = _or_all_fail(lambda: self.identity(graph), exchange)
        axes = graph.axes
        if not is_first:
            # No other capture proves that other ranks have this graph: it is stored for this place.
            identity = at_places(identity, tuple(axes.coordinates), axes.coordinates)
        shared = share_capture(
            identity,
            graph,
            folder=GraphFolder(self.folder, axes=axes),
            axes=axes,
            exchange=exchange,
            is_placed=self.settings.compile.autoparallel,
        )
        self._tell(shared)
        return shared

    @contextmanager
    def generating_code(
        self, shared: SharedGraph[Any], axes: MeshAxes, *, part: str = "model"
    ) -> Iterator[None]:
        """Inside, code is generated for a graph: from what a compiler made of it before, if stored.

        Else what the compiler makes is stored, once for all ranks that run the very same graph:
        code holds the numbers that follow from a rank's place, and the names of a stage's layers.

        Args:
            shared: the graph.
            axes: of the graph.
            part: tells what the graph is of, if graphs of other parts of a model equal it but for
                names.
        """
        folder = GraphFolder(self.folder, axes=axes)
        at = at_places(shared.identity, shared.rule_axes, axes.coordinates)
        identity = Fingerprint(fields={**at.fields, "part": json.dumps(part)})
        stored = folder.find_products(identity)
        if stored is not None:
            try:
                reuse_products(stored)
            except (OSError, ValueError) as error:  # other ranks wait, and a compiler can do it
                logger.warning(
                    "--compile.artifacts: what a compiler made before cannot be used by this rank, "
                    f"which compiles: {error}"
                )
                stored = None
        with collected_products() as products:
            yield
        if stored is None and products and shared.is_first_of_its_kind:
            folder.write_products(identity, products)

    def identity(self, graph: StorableGraph[Any]) -> Fingerprint:
        """``step_identity`` of a graph in this run."""
        return step_identity(self.settings, **graph.identified_by)

    def axes(self, model: nn.Module) -> MeshAxes:
        """Names of this rank's process groups, the same on every rank."""
        meshes = [
            mesh
            for slot in collect_state(model)
            for mesh in meshes_of(flatten_tensor(slot.tensor)[1])
        ]
        for axis in _AXES:
            mesh = self.parallel_dims.get_optional_mesh(axis)
            if mesh is not None:
                meshes.append(mesh)
        groups = expert_groups(self.settings.compile, model)
        groups |= {label: group.group_name for label, group in self.second_groups.items()}
        return MeshAxes.of(meshes, groups=groups)

    def _tell(self, shared: SharedGraph[Any]) -> None:
        if shared.loaded_from is not None:
            logger.info(f"--compile.artifacts: loaded {shared.loaded_from}")
        else:
            logger.info(
                f"--compile.artifacts: captured {shared.identity.digest}, for {self.folder.path}"
            )
        if not dist.is_initialized() or dist.get_rank() == 0:
            logger.info(f"--compile.artifacts: {groups_text(shared.groups)}")


def _or_all_fail(identity: Callable[[], Fingerprint], exchange: RankExchange) -> Fingerprint:
    """What ``identity`` gives; if a rank cannot tell, all ranks end."""
    found: Fingerprint | None = None
    failed: Exception | None = None
    try:
        found = identity()
    except Exception as error:  # noqa: BLE001  # other ranks must hear of whatever it is
        failed = error
    exchange.all_succeeded(failed, what="could not tell what its graph depends on")
    assert found is not None
    return found


def artifact_folder(options: CompileConfig) -> ArtifactFolder | None:
    """The folder that ``options`` ask for; None if they ask for none."""
    if options.artifacts is None:
        return None
    max_bytes = int(options.artifacts_max_gib * 2**30)
    return ArtifactFolder(Path(options.artifacts), max_bytes=max_bytes)
