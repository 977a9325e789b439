"""The graphs of all actions of one stage: as cut from its joint graph, and after passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from gt_config.node_keys import PipelineAction
from gt_pipeline.errors import StageCaptureError
from gt_pipeline.graph.action_graph import ActionGraph
from gt_pipeline.graph.activations import example_of, signature_of
from gt_pipeline.graph.stage_capture import StageCapture
from gt_pipeline.runner.stage_protocol import ActivationSignature


@dataclass(frozen=True, slots=True, kw_only=True)
class StageGraphs:
    """The graphs of a stage's actions; those of a backward are None if it was captured without."""

    capture: StageCapture
    unshard: ActionGraph
    forward: ActionGraph
    full_backward: ActionGraph | None = None
    backward_input: ActionGraph | None = None
    backward_weight: ActionGraph | None = None
    reduce_grad: ActionGraph | None = None

    def of(self, kind: PipelineAction) -> ActionGraph:
        """The graph of one kind of action.

        Raises:
            KeyError: the stage has none of that kind.
        """
        return {graph.kind: graph for graph in self}[kind]

    def __iter__(self) -> Iterator[ActionGraph]:
        graphs = (
            self.unshard,
            self.forward,
            self.full_backward,
            self.backward_input,
            self.backward_weight,
            self.reduce_grad,
        )
        return (graph for graph in graphs if graph is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewrittenStage:
    """A stage's graphs before code is generated for them: what can be stored, and loaded."""

    graphs: StageGraphs
    """As cut from the joint graph."""

    actions: Mapping[PipelineAction, ActionGraph]
    """After passes, by kind; the graph as it was cut where no pass changed it."""


def refuse_other_stage(
    capture: StageCapture,
    *,
    stage_index: int,
    num_stages: int,
    activations: Sequence[Tensor | ActivationSignature],
    has_loss: bool,
) -> None:
    """Make sure that a capture made before is of this stage.

    Raises:
        StageCaptureError: it is not; every difference is listed.
    """
    entering = tuple(signature_of(example_of(each)) for each in activations)
    pairs = {
        "stage_index": (capture.stage_index, stage_index),
        "num_stages": (capture.num_stages, num_stages),
        "activations": (_texts(capture.input_signature), _texts(entering)),
        "loss inside": (capture.has_target, has_loss),
        "a backward": (capture.differentiates, True),
    }
    problems = [
        f"{name}: {of_graphs} of the graphs, {wanted} of the stage"
        for name, (of_graphs, wanted) in pairs.items()
        if of_graphs != wanted
    ]
    if problems:
        raise StageCaptureError(
            what=f"stage {stage_index} cannot run graphs that were made before", problems=problems
        )


def _texts(signatures: Sequence[ActivationSignature]) -> list[str]:
    return list(map(str, signatures))
