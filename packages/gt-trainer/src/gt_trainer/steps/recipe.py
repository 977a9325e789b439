"""The passes of each graph of a run, as the user's ``--compile.*`` options ask for them.

The native recipe (``gt_passes.default_passes``), or that of the backend of planned steps. Which
graphs there are follows from the mode and the pipeline; which passes run on each, from where the
passes declare to run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torch.fx import GraphModule

from gt_config import CompileConfig
from gt_config.graph_kinds import PIPELINE_ACTIONS, GraphKind
from gt_passes import (
    GraphPass,
    PassContext,
    PassManager,
    SubgraphCompiler,
    declare_pure_operator,
    default_passes,
)
from gt_trainer.decoder.attention import flex_attention_options
from gt_trainer.placement.planned_machine import planned_machine

ReshardChoice = Literal["default", "always", "never"]
"""torchtitan's ``--parallelism.fsdp_reshard_after_forward``."""

_RESHARD: dict[ReshardChoice, bool | None] = {
    "default": None,  # as the memory policy says
    "always": True,
    "never": False,
}

# torchtitan's expert-parallel combine (torchtitan/ops/scatter_add.py) is a sum in a fixed order.
declare_pure_operator("torchtitan::deterministic_scatter_add")


def graphs_of(options: CompileConfig, *, has_pipeline: bool) -> tuple[GraphKind, ...]:
    """The kinds of graph that a run captures; none of an eager one.

    Args:
        options: validated.
        has_pipeline: whether the model is cut into stages.
    """
    if options.mode == "none":
        return ()
    if has_pipeline:
        return ("STAGE", *PIPELINE_ACTIONS)
    if options.mode == "aot_joint":
        return ("JOINT_FORWARD", "JOINT_BACKWARD")
    if options.accumulation == "reduce_once":
        return ("MICROBATCH",)
    return ("STEP",)


def passes_of(
    options: CompileConfig,
    graph: GraphKind,
    *,
    reshard_after_forward: ReshardChoice = "default",
    compiler: SubgraphCompiler | None = None,
) -> tuple[GraphPass, ...]:
    """The passes that ``options`` ask for on a kind of graph; equal where they mean the same.

    What models compile by themselves when they run eagerly, FlexAttention on GPUs, is compiled in
    any case, and in the same way. A graph that is not going to run has the symmetric memory of the
    machine that it is planned for.

    Args:
        options: validated; nothing else of the configuration is read.
        graph: the kind of graph.
        reshard_after_forward: whether FSDP parameters are gathered again for the backward.
        compiler: in place of Inductor, for a graph that is not going to run.
    """
    if options.inductor_compilation == "autoparallel_backend":
        # Imported here: no other run pays for it.
        from gt_autoparallel.backend import backend_passes
        from gt_trainer.placement.memory_budget import asked_budget_bytes

        return backend_passes(
            memory_budget_bytes=asked_budget_bytes(options.autoparallel_solver),
            bucket_cap_mib=options.fsdp_bucket_cap_mib,
            reshard_after_forward=_RESHARD[reshard_after_forward],
            compiler=compiler,
        )
    return default_passes(
        options,
        graph=graph,
        reshard_after_forward=_RESHARD[reshard_after_forward],
        compiler=compiler,
        flex_attention_options=flex_attention_options(),
        symmetric_memory=None if compiler is None else planned_machine().symmetric_memory(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The passes of a run, which are bound to each graph when it is captured.

    Args:
        options: As for ``passes_of``.
        reshard_after_forward: As for ``passes_of``.
        debug_folder: The folder in which each captured graph gets a folder for its graphs before
            and after each pass, if ``options.debug_graph_passes`` asks for them. Every rank needs
            a separate one.
        compiler: As for ``passes_of``.
        summarize: As for ``PassManager``.
        has_folder_per_kind: Whether graphs of each kind are numbered apart, in a folder named
            after the kind.
    """

    options: CompileConfig
    reshard_after_forward: ReshardChoice = "default"
    debug_folder: Path | None = None
    compiler: SubgraphCompiler | None = None
    summarize: Callable[[GraphModule], object] | None = None
    has_folder_per_kind: bool = False
    _num_dumped: Counter[Path] = field(default_factory=Counter, init=False, compare=False)

    def passes(self, graph: GraphKind) -> tuple[GraphPass, ...]:
        """Return the passes for graphs of a kind."""
        return passes_of(
            self.options,
            graph,
            reshard_after_forward=self.reshard_after_forward,
            compiler=self.compiler,
        )

    def __call__(self, context: PassContext, graph: GraphKind) -> PassManager:
        """Return the passes for one captured graph."""
        return PassManager(
            self.passes(graph),
            context=context,
            verify=self.options.verify_passes,
            dump_directory=self._dump_directory(graph),
            summarize=self.summarize,
        )

    def _dump_directory(self, graph: GraphKind) -> Path | None:
        if self.debug_folder is None or not self.options.debug_graph_passes:
            return None
        folder = (
            self.debug_folder / graph.lower() if self.has_folder_per_kind else self.debug_folder
        )
        self._num_dumped[folder] += 1
        return folder / f"graph_{self._num_dumped[folder] - 1}"
