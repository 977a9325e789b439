"""From the user's ``--compile.*`` options to the passes of a pipeline stage.

The recipe is that of a whole step, ``gt_passes.default_recipe``, with each pass where a stage has
what it works on: chunks and recomputation need forward and backward together, so they run before
the stage is cut into actions; buckets stand in the graphs that gather parameters and reduce
gradients; exchanges and compilation belong to the graphs that compute. A schedule puts the actions
in order, so nothing moves from one graph to another.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.fx import GraphModule

from gt_config import CompileConfig
from gt_config.node_keys import PipelineAction
from gt_passes import PassContext, PassManagerReport
from gt_pipeline.graph import StageCapture
from gt_trainer.steps.recipe import recipe_of

_CLEAN_UP = frozenset({"remove-dead-code", "merge-waits", "canonicalize-views"})
_ON_CAPTURE = _CLEAN_UP | {
    "share-all-gathers",
    "chunk-modules",
    "tag-saved-tensors",
    "recompute-tagged",
}
_COMPUTING = _CLEAN_UP | {
    "schedule-ep-overlap",
    "separate-exchange-group",
    "fuse-parallel-matmuls",
    "compile-flex-attention",
    "compile-regions",
    "compile-whole-graph",
}
_ON_ACTION: Mapping[PipelineAction, frozenset[str]] = {
    "UNSHARD": _CLEAN_UP | {"bucket-all-gathers", "delay-waits"},
    "FORWARD": _COMPUTING,
    "FULL_BACKWARD": _COMPUTING,
    "BACKWARD_INPUT": _COMPUTING,
    "BACKWARD_WEIGHT": _COMPUTING,
    "OVERLAP_F_B": _COMPUTING,
    "REDUCE_GRAD": _CLEAN_UP | {"bucket-reduce-scatters", "bucket-all-reduces", "delay-waits"},
}


class StagePasses:
    """The passes of one stage; collects what they report.

    Args:
        options: validated. Passes that ``options.passes`` names run on the graphs that compute, and
            nowhere else.
        debug_folder: as for ``recipe_of``; None writes nothing.
    """

    def __init__(self, options: CompileConfig, *, debug_folder: Path | None = None) -> None:
        self._options = options
        self._debug_folder = debug_folder
        self.reports: list[PassManagerReport] = []
        """Of the joint graph, and of those of the actions, in the order in which they were made."""

    def on_capture(self, capture: StageCapture) -> None:
        """Run those that need forward and backward together, before the graph is cut."""
        traced = capture.traced
        names = tuple(entry.name for entry in traced.inputs[: traced.num_static_inputs])
        context = PassContext(fake_mode=traced.fake_mode, static_input_names=names)
        self._run(traced.graph_module, context, "joint", _ON_CAPTURE - self._added)

    def on_action(
        self, graph_module: GraphModule, kind: PipelineAction, context: PassContext
    ) -> None:
        """Run those that belong on the graph of one action."""
        names = _ON_ACTION[kind]
        only = names | self._added if names is _COMPUTING else names - self._added
        self._run(graph_module, context, kind.lower(), only)

    @property
    def _added(self) -> frozenset[str]:
        return frozenset(self._options.passes)

    def _run(
        self, graph_module: GraphModule, context: PassContext, name: str, only: frozenset[str]
    ) -> None:
        folder = None if self._debug_folder is None else self._debug_folder / name
        build = recipe_of(
            self._options, reshard_after_forward="never", only=only, debug_folder=folder
        )
        self.reports.append(build(context).run(graph_module))
