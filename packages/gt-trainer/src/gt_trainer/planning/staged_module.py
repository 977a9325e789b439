"""A module cut into the stages of a pipeline, each captured, and the pipeline simulated.

Where a module is cut follows from the names of its parts (``gt_pipeline.split``); what a stage
gives to the next one is what its capture returns. Stages are sharded over the ranks that share
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule

from gt_config.graph_kinds import GraphKind
from gt_passes import GraphPass, PassContext, PassManager
from gt_pipeline.graph import GraphPipelineStage, StageCapture
from gt_pipeline.runner import ActivationSignature, MicrobatchInputs
from gt_pipeline.schedules import schedule_of
from gt_pipeline.split import (
    LayerNaming,
    RemovalPolicy,
    SharedGroup,
    find_naming,
    module_names_per_stage,
    pipeline_metadata,
    stage_modules,
)
from gt_trainer.pipelines.pipeline_plan import PipelinePlan
from gt_trainer.planning.run_recipe import RunRecipe

PassesOf = Callable[[GraphKind], tuple[GraphPass, ...]]
"""The passes of a kind of graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleStages:
    """How a module is cut into stages, and what is done with what the last one returns."""

    degrees: Sequence[int]
    """Pipeline ranks that a plan looks at."""

    loss_of: Callable[..., Tensor]
    """From what the module returns of the first of the inputs, and the others, to a scalar."""

    schedules: Sequence[str] = ("1F1B", "Interleaved1F1B")
    """Of ``gt_pipeline.schedules``, by name."""

    naming: LayerNaming | None = None
    """What the module calls its parts; None: as torchtitan or transformers do."""

    policy: RemovalPolicy = field(default_factory=RemovalPolicy)
    """What stands in a stage for what it does not have."""

    shared_groups: Sequence[SharedGroup] = ()
    """Parameters that several stages have, as a tied weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedModule:
    """A module on meta, cut for one schedule."""

    pipeline: PipelinePlan
    parts: tuple[nn.Module, ...]
    """One for each stage, not sharded."""

    batch: Tensor
    """One microbatch on meta: what the first stage takes."""

    target: tuple[Tensor, ...]
    """What the loss takes beside what the last stage returns."""

    stages: ModuleStages

    @classmethod
    def of(
        cls, model: nn.Module, stages: ModuleStages, recipe: RunRecipe, inputs: Sequence[Tensor]
    ) -> StagedModule:
        """Cut a module on meta.

        Args:
            model: not changed.
            stages: says how.
            recipe: with a pipeline.
            inputs: of one microbatch, on meta.

        Raises:
            GtPipelineError: it cannot be cut so, or not run by that schedule.
        """
        assert recipe.schedule is not None
        names = names_of_stages(model, stages, recipe)
        schedule = schedule_of(
            recipe.schedule,
            num_ranks=recipe.pp,
            num_stages=len(names),
            num_microbatches=recipe.num_microbatches,
        )
        parts = stage_modules(
            model,
            names,
            range(len(names)),
            policy=stages.policy,
            shared_groups=stages.shared_groups,
        )
        batch, *target = inputs
        return cls(
            pipeline=PipelinePlan(schedule=schedule, names_per_stage=names),
            parts=tuple(parts[index] for index in range(len(names))),
            batch=batch,
            target=tuple(target),
            stages=stages,
        )

    def captured(self, passes_of: PassesOf) -> tuple[GraphPipelineStage, ...]:
        """The stages as graphs, in order; within ``fake_ranks``, once parts are sharded.

        Raises:
            GtPipelineError: a stage cannot be captured.
            CaptureError: likewise.
        """
        return tuple(self._captured(passes_of))

    def _captured(self, passes_of: PassesOf) -> Iterator[GraphPipelineStage]:
        entering: tuple[ActivationSignature, ...] = ()
        fake_mode = None
        last = len(self.parts) - 1
        for index, part in enumerate(self.parts):
            stage = GraphPipelineStage(
                part,
                stage_index=index,
                num_stages=len(self.parts),
                activations=entering,
                inputs=MicrobatchInputs(args=(self.batch,), target=self.target),
                loss_fn=self._loss if index == last else None,
                prepare_capture=lambda capture: self._before_cut(capture, passes_of),
                transform=lambda graph, kind, context: _run(passes_of(kind), graph, context),
                fake_mode=fake_mode,
                verify=False,
            )
            entering, fake_mode = stage.output_signature, stage.fake_mode
            yield stage

    def _loss(self, output: Any, target: tuple[Tensor, ...]) -> Tensor:
        return self.stages.loss_of(output, *target)

    def _before_cut(self, capture: StageCapture, passes_of: PassesOf) -> None:
        traced = capture.traced
        names = tuple(entry.name for entry in traced.inputs[: traced.num_static_inputs])
        context = PassContext(
            fake_mode=traced.fake_mode,
            static_input_names=names,
            num_live_microbatches=self.pipeline.live_microbatches,
        )
        _run(passes_of("STAGE"), traced.graph_module, context)


def names_of_stages(
    model: nn.Module, stages: ModuleStages, recipe: RunRecipe
) -> tuple[tuple[str, ...], ...]:
    """The modules of each stage of a recipe: layers evenly, what is around them counted as layers.

    That the stages compute what the model does is for whoever cuts it to see
    (``gt_pipeline.split.check_splittable``, with values).

    Raises:
        GtPipelineError: it has no such names, or too few layers.
    """
    assert recipe.schedule is not None
    naming = stages.naming or find_naming(model)
    num_layers = len(naming.layer_names_of(model))
    weights = {"input_weight": int(bool(naming.first)), "output_weight": int(bool(naming.last))}
    numbers = pipeline_metadata(
        num_layers, schedule=recipe.schedule, pp_degree=recipe.pp, **weights
    )
    return module_names_per_stage(
        num_layers, num_stages=numbers.num_stages, naming=naming, **weights
    )


def _run(
    passes: tuple[GraphPass, ...],
    graph_module: GraphModule,
    context: PassContext,
) -> None:
    PassManager(passes, context=context, verify=False).run(graph_module)
