"""The forwards of a stage with nothing kept: one for each mode of its module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn
from torch.fx import GraphModule

from gt_pipeline.errors import StageGraphError
from gt_pipeline.graph.action_graph import ActionGraph
from gt_pipeline.graph.executables import Executable
from gt_pipeline.graph.stage_capture import StageCapture
from gt_pipeline.graph.stage_cut import cut_stage
from gt_pipeline.graph.stage_graphs import StageGraphs
from gt_pipeline.graph.stage_inputs import MicrobatchReader
from gt_trace.capture.captured_mode import CapturedMode


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationForward:
    """A stage's forward in one mode of its module, with nothing kept."""

    mode: CapturedMode
    forward: Executable
    reader: MicrobatchReader


class StageEvaluations:
    """Captured when they are first asked for, and kept.

    Args:
        module: of the stage.
        training: its graphs; an evaluation reads nothing that training does not gather.
        capture: captures the forward in the module's present mode.
        transform: edits an action's graph.
        verify: whether to verify graphs.
    """

    def __init__(
        self,
        module: nn.Module,
        training: StageGraphs,
        *,
        capture: Callable[[], StageCapture],
        transform: Callable[[ActionGraph], ActionGraph],
        verify: bool,
    ) -> None:
        self._module = module
        self._training = training
        self._capture = capture
        self._transform = transform
        self._verify = verify
        self._known: list[EvaluationForward] = []

    def now(self) -> EvaluationForward:
        """In the present mode of the module and its parts (training or not), and of autocast.

        Raises:
            StageGraphError: it reads what training does not gather.
        """
        mode = CapturedMode.now(self._module)
        for each in self._known:
            if each.mode == mode:
                return each
        self._known.append(self._captured())
        return self._known[-1]

    def graph_modules(self) -> Iterator[GraphModule]:
        """Of those that are known, in the order of their capture."""
        return (each.forward.action.graph_module for each in self._known)

    def _captured(self) -> EvaluationForward:
        capture = self._capture()
        graphs = cut_stage(capture, verify=self._verify)
        known = {*self._training.capture.inputs, *self._training.unshard.outputs}
        missing = [str(s) for s in graphs.forward.static_inputs if s not in known]
        if missing:
            raise StageGraphError(
                what=f"stage {capture.stage_index} reads in evaluation what training does not "
                "gather",
                problems=missing,
            )
        return EvaluationForward(
            mode=capture.traced.mode,
            forward=Executable(self._transform(graphs.forward)),
            reader=MicrobatchReader(capture),
        )
