"""The passes of a pipeline stage: before it is cut into actions, and on the graph of each action.

The recipe is that of a whole step, with each pass where a stage has what it works on, as the passes
declare it: chunks and recomputation need forward and backward together, so they run before the cut,
and so does what puts chunks in order, which the cut keeps; buckets stand in the graphs that gather
parameters and reduce gradients; compilation belongs to the graphs that compute. A schedule puts the
actions in order, so nothing moves from one graph to another.

What rewrites a graph comes first, what generates code for it after that, maybe in another process,
which has loaded what was rewritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from torch.fx import GraphModule

from gt_config import CompileConfig
from gt_config.graph_kinds import PIPELINE_ACTIONS, GraphKind
from gt_config.node_keys import PipelineAction
from gt_passes import GraphPass, PassContext, PassManager, PassManagerReport, SubgraphCompiler
from gt_pipeline.graph import StageCapture
from gt_trainer.steps.recipe import passes_of, recipe_of


class StagePasses:
    """The passes of one stage; collects what they report.

    Args:
        options: validated.
        debug_folder: as for ``recipe_of``; None writes nothing.
        compiler: as for ``recipe_of``.
        num_live_microbatches: of the stage, that hold at once what their forwards saved.
        summarize: as for ``PassManager``.
    """

    def __init__(
        self,
        options: CompileConfig,
        *,
        debug_folder: Path | None = None,
        compiler: SubgraphCompiler | None = None,
        num_live_microbatches: int = 1,
        summarize: Callable[[GraphModule], object] | None = None,
    ) -> None:
        self._options = options
        self._debug_folder = debug_folder
        self._compiler = compiler
        self._summarize = summarize
        self.num_live_microbatches = num_live_microbatches
        self._reports: list[tuple[GraphKind, PassManagerReport]] = []
        self._managers: dict[GraphKind, PassManager] = {}
        """Of graphs that are rewritten; the last of a kind."""

    @property
    def reports(self) -> tuple[tuple[GraphKind, PassManagerReport], ...]:
        """On the joint graph and on those of the actions, in the order of their making, by kind."""
        return tuple(self._reports)

    def all_passes(self) -> tuple[GraphPass, ...]:
        """Every pass that runs on a graph of the stage; those of pairs included."""
        kinds: tuple[GraphKind, ...] = ("STAGE", *PIPELINE_ACTIONS)
        return tuple(each for kind in kinds for each in self._passes_of(kind))

    @property
    def generates_code(self) -> bool:
        """Whether ``generate_code`` does anything on any graph."""
        return any(each.generates_code for each in self.all_passes())

    def on_capture(self, capture: StageCapture) -> None:
        """Run those that need forward and backward together, before the graph is cut."""
        traced = capture.traced
        names = tuple(entry.name for entry in traced.inputs[: traced.num_static_inputs])
        context = PassContext(
            fake_mode=traced.fake_mode,
            static_input_names=names,
            num_live_microbatches=self.num_live_microbatches,
        )
        report = self._manager("STAGE", context).run(traced.graph_module)
        self._reports.append(("STAGE", report))

    def rewrite(
        self, graph_module: GraphModule, kind: PipelineAction, context: PassContext
    ) -> None:
        """Run those that belong on the graph of one action, up to the first that generates code."""
        manager = self._managers[kind] = self._manager(kind, context)
        self._reports.append((kind, manager.run_before_code(graph_module)))

    def take_reports(self, reports: Iterable[tuple[GraphKind, PassManagerReport]]) -> None:
        """Tell what passes did when the graphs, which were loaded and verified, were made."""
        self._reports += reports

    def generate_code(
        self, graph_module: GraphModule, kind: PipelineAction, context: PassContext
    ) -> None:
        """Run those that ``rewrite`` has left, on what was rewritten or loaded last of its kind."""
        manager = self._managers.pop(kind, None) or self._manager(kind, context)
        position = max(at for at, (of, _) in enumerate(self._reports) if of == kind)
        report = manager.run_from_code(
            graph_module, earlier=self._reports[position][1], is_verified=True
        )
        self._reports[position] = (kind, report)

    def _manager(self, graph: GraphKind, context: PassContext) -> PassManager:
        folder = None if self._debug_folder is None else self._debug_folder / graph.lower()
        recipe = recipe_of(
            self._options,
            debug_folder=folder,
            compiler=self._compiler,
            summarize=self._summarize,
        )
        return recipe(context, graph)

    def _passes_of(self, graph: GraphKind) -> tuple[GraphPass, ...]:
        return passes_of(self._options, graph, compiler=self._compiler)
