"""The graphs of a stage behind passes, with those they were cut from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from gt_config.node_keys import PipelineAction
from gt_pipeline.errors import StageCaptureError
from gt_pipeline.graph.action_graph import ActionGraph, copied
from gt_pipeline.graph.activations import example_of, repetitions, signature_of
from gt_pipeline.graph.executables import GraphTransform, transformed
from gt_pipeline.graph.stage_capture import StageCapture
from gt_pipeline.graph.stage_cut import cut_stage
from gt_pipeline.graph.stage_graphs import StageGraphs
from gt_pipeline.runner.stage_protocol import ActivationSignature


@dataclass(frozen=True, slots=True, kw_only=True)
class RewrittenStage:
    """The graphs of a stage's actions behind passes, which can be stored if they have no code."""

    graphs: StageGraphs
    """The graphs as they were cut from the joint graph."""

    actions: Mapping[PipelineAction, ActionGraph]
    """After passes, by kind; the graph as it was cut where no pass changed it."""

    @classmethod
    def of(
        cls, graphs: StageGraphs, *, changed: Mapping[PipelineAction, ActionGraph] | None = None
    ) -> RewrittenStage:
        """Return a stage whose graphs may be edited: none is shared with those that were cut.

        Args:
            graphs: The graphs as they were cut.
            changed: Graphs of actions that passes have changed already; the others are copied.
        """
        found = changed or {}
        actions = {each.kind: found.get(each.kind) or copied(each) for each in graphs}
        return cls(graphs=graphs, actions=actions)


def rewrite_stage(
    capture: StageCapture, *, transform: GraphTransform | None = None, verify: bool = True
) -> RewrittenStage:
    """Cut a stage's joint graph, and rewrite the graphs of its actions.

    Args:
        capture: as for ``cut_stage``.
        transform: edits each action's graph; None leaves them as they are.
        verify: whether to verify every graph, as cut and as rewritten.

    Raises:
        StageCutError, StageGraphError: as ``cut_stage``; the last also for a transform that breaks
            a graph.
    """
    graphs = cut_stage(capture, verify=verify)
    fake_mode = capture.traced.fake_mode
    return RewrittenStage(
        graphs=graphs,
        actions={
            each.kind: transformed(each, transform, fake_mode=fake_mode, verify=verify)
            for each in graphs
        },
    )


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
    examples = map(example_of, activations)
    entering = tuple(map(signature_of, examples, repetitions(activations)))
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
