"""All graphs that a stage runs, ready to run: of actions, of pairs of actions and of evaluations.

What a step does with the graphs, and what it holds between them, is ``pipeline_stage``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import get_args

from torch import nn

from gt_config.node_keys import OverlappedBackward, PipelineAction
from gt_passes.cuda_graphs.whole_recording import WholeRecording, whole_recording
from gt_passes.verifier.collective_order import CollectiveSequence
from gt_pipeline.graph.action_graph import ActionGraph
from gt_pipeline.graph.executables import Executable, GraphTransform, transformed
from gt_pipeline.graph.launched_executable import LaunchedExecutable
from gt_pipeline.graph.overlapped_actions import OverlappedActions, overlap_actions
from gt_pipeline.graph.recorded_actions import StageRecordings
from gt_pipeline.graph.rewrite_stage import RewrittenStage
from gt_pipeline.graph.stage_capture import StageCapture
from gt_pipeline.graph.stage_evaluations import StageEvaluations


class StageExecutables:
    """Made from rewritten graphs: pairs and evaluations when they are first asked for.

    Args:
        rewritten: the stage's graphs.
        module: of the stage.
        capture_evaluation: captures the module's forward in its present mode.
        transform: edits the graphs that are not in ``rewritten``: of pairs and evaluations.
        recordings: of the stage.
        verify: whether to verify every graph.
    """

    def __init__(
        self,
        rewritten: RewrittenStage,
        module: nn.Module,
        *,
        capture_evaluation: Callable[[], StageCapture],
        transform: GraphTransform | None,
        recordings: StageRecordings,
        verify: bool,
    ) -> None:
        self._graphs = rewritten.graphs
        self._fake_mode = rewritten.graphs.capture.traced.fake_mode
        self._transform = transform
        self._recordings = recordings
        self._verify = verify
        actions = dict(rewritten.actions)
        self.marks = [_mark_of(each) for each in actions.values() if not each.is_empty]
        """How each graph of a training step is to be recorded; pairs are not among them."""

        self.unshard = LaunchedExecutable(actions.pop("UNSHARD"), verify=verify)
        self.reduce = LaunchedExecutable(actions.pop("REDUCE_GRAD"), verify=verify)
        self.computing: dict[PipelineAction, Executable] = {
            kind: Executable(action, recordings) for kind, action in actions.items()
        }
        """What runs for a microbatch, by action."""

        self.evaluations = StageEvaluations(
            module,
            self._graphs,
            capture=capture_evaluation,
            transform=self._transformed,
            verify=verify,
        )
        self.pairs: dict[tuple[int, OverlappedBackward], tuple[OverlappedActions, Executable]] = {}
        """Those that were asked for, by stage and kind of the backward."""

    @property
    def actions(self) -> Mapping[PipelineAction, ActionGraph]:
        """The graph that each action runs, by kind."""
        computing = [each.action for each in self.computing.values()]
        return {each.kind: each for each in (self.unshard.action, *computing, self.reduce.action)}

    def pair(
        self, other: StageExecutables, kind: OverlappedBackward
    ) -> tuple[OverlappedActions, Executable]:
        """This stage's forward and a backward of another stage of the rank, as one graph.

        Raises:
            StageCutError: the two stages were captured with different fake modes.
            ValueError: there is no such kind of backward.
        """
        key = (other._graphs.capture.stage_index, kind)
        if (found := self.pairs.get(key)) is not None:
            return found
        if kind not in (allowed := get_args(OverlappedBackward)):
            raise ValueError(
                f"backward_kind is {kind!r}; allowed: {' or '.join(map(repr, allowed))}"
            )
        backward = other._graphs.of(kind)
        actions = overlap_actions(self._graphs.forward, backward, verify=self._verify)
        executable = Executable(self._transformed(actions.action), self._recordings)
        self.pairs[key] = actions, executable
        return actions, executable

    def marks_of_pairs(self) -> list[WholeRecording | None]:
        """How each pair that was asked for is to be recorded."""
        return [_mark_of(pair.action) for _, pair in self.pairs.values()]

    def collectives(self) -> Mapping[str, tuple[str, ...]]:
        """The collectives of every graph, in order, a line each; graphs without any are missing."""
        named = {str(kind): each.graph_module for kind, each in self.actions.items()}
        for (backward_stage, kind), (_, pair) in self.pairs.items():
            named[f"FORWARD with {kind} of stage {backward_stage}"] = pair.action.graph_module
        for number, graph_module in enumerate(self.evaluations.graph_modules()):
            named[f"FORWARD of evaluation {number}"] = graph_module
        lines = {
            name: tuple(call.text for call in CollectiveSequence.of(graph_module).calls)
            for name, graph_module in named.items()
        }
        return {name: of_action for name, of_action in lines.items() if of_action}

    def group_names(self) -> tuple[str, ...]:
        """The process groups in which actions communicate, by name, each once."""
        return tuple(
            {
                call.group_name: None
                for action in self.actions.values()
                for call in CollectiveSequence.of(action.graph_module).calls
            }
        )

    def _transformed(self, action: ActionGraph) -> ActionGraph:
        return transformed(action, self._transform, fake_mode=self._fake_mode, verify=self._verify)


def _mark_of(action: ActionGraph) -> WholeRecording | None:
    return whole_recording(action.graph_module)
