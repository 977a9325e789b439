"""The graphs of all actions of one stage, as cut from its joint graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gt_config.node_keys import PipelineAction
from gt_pipeline.graph.action_graph import ActionGraph
from gt_pipeline.graph.stage_capture import StageCapture


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
