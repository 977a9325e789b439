"""The passes of a pipeline stage: before it is cut into actions, and on the graph of each action.

The recipe is that of a whole step, with each pass where a stage has what it works on, as the passes
declare it: chunks and recomputation need forward and backward together, so they run before the cut,
and so does what puts chunks in order, which the cut keeps; buckets stand in the graphs that gather
parameters and reduce gradients; compilation belongs to the graphs that compute. A schedule puts the
actions in order, so nothing moves from one graph to another.
"""

from __future__ import annotations

from pathlib import Path

from torch.fx import GraphModule

from gt_config import CompileConfig
from gt_config.graph_kinds import GraphKind
from gt_config.node_keys import PipelineAction
from gt_passes import PassContext, PassManagerReport, SubgraphCompiler
from gt_pipeline.graph import StageCapture
from gt_trainer.steps.recipe import recipe_of


class StagePasses:
    """The passes of one stage; collects what they report.

    Args:
        options: validated.
        debug_folder: as for ``recipe_of``; None writes nothing.
        compiler: as for ``recipe_of``.
        num_live_microbatches: of the stage, that hold at once what their forwards saved.
    """

    def __init__(
        self,
        options: CompileConfig,
        *,
        debug_folder: Path | None = None,
        compiler: SubgraphCompiler | None = None,
        num_live_microbatches: int = 1,
    ) -> None:
        self._options = options
        self._debug_folder = debug_folder
        self._compiler = compiler
        self._num_live_microbatches = num_live_microbatches
        self.reports: list[PassManagerReport] = []
        """Reports on the joint graph and on the actions' graphs, in the order of their making."""

    def on_capture(self, capture: StageCapture) -> None:
        """Run those that need forward and backward together, before the graph is cut."""
        traced = capture.traced
        names = tuple(entry.name for entry in traced.inputs[: traced.num_static_inputs])
        context = PassContext(
            fake_mode=traced.fake_mode,
            static_input_names=names,
            num_live_microbatches=self._num_live_microbatches,
        )
        self._run(traced.graph_module, context, "STAGE")

    def on_action(
        self, graph_module: GraphModule, kind: PipelineAction, context: PassContext
    ) -> None:
        """Run those that belong on the graph of one action."""
        self._run(graph_module, context, kind)

    def _run(self, graph_module: GraphModule, context: PassContext, graph: GraphKind) -> None:
        folder = None if self._debug_folder is None else self._debug_folder / graph.lower()
        recipe = recipe_of(self._options, debug_folder=folder, compiler=self._compiler)
        self.reports.append(recipe(context, graph).run(graph_module))
