"""A stage's graphs ready to run, transformed, with what they read of its state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.fx import GraphModule

from gt_config.node_keys import PipelineAction
from gt_passes import PassContext, Verifier
from gt_passes.verifier.verifier import GraphInterface
from gt_pipeline.errors import StageGraphError
from gt_pipeline.graph._torch_internals import FakeTensorMode
from gt_pipeline.graph.action_graph import ActionGraph, BoxedFunction, boxed, copied
from gt_pipeline.graph.gradient_accumulators import owned_results
from gt_pipeline.graph.overlapped_actions import OverlappedActions
from gt_pipeline.graph.slots import SlotKind
from gt_pipeline.graph.stage_inputs import MicrobatchReader
from gt_trace.capture.captured_mode import CapturedMode

GraphTransform = Callable[[GraphModule, PipelineAction, PassContext], object]
"""Edits the graph of one kind of action in place: a recipe of passes, a compiler. It keeps what the
graph takes and gives."""


def transformed(
    action: ActionGraph, transform: GraphTransform, *, fake_mode: FakeTensorMode, verify: bool
) -> ActionGraph:
    """A copy of an action whose graph the transform has edited.

    Args:
        action: stays as it is.
        transform: what edits the copy.
        fake_mode: of the graph's fake values.
        verify: whether to verify the result.

    Raises:
        StageGraphError: it takes or gives something else now, or is broken.
    """
    result = copied(action)
    interface = GraphInterface.of(result.graph_module)
    context = PassContext(
        fake_mode=fake_mode, static_input_names=tuple(slot.name for slot in action.static_inputs)
    )
    transform(result.graph_module, action.kind, context)
    if not verify:
        return result
    problems = Verifier().verify(result.graph_module, interface=interface).problems
    if problems:
        raise StageGraphError(
            what=f"the transform broke {action.kind} of stage {action.stage_index}",
            problems=map(str, problems),
        )
    return result


class Executable:
    """An action's graph, ready to run."""

    def __init__(self, action: ActionGraph) -> None:
        self.action = action
        self.run: BoxedFunction = boxed(action.graph_module)
        self.static: tuple[Tensor, ...] | None = None
        """The tensors that the graph reads of the state; None until they are asked for."""

        is_reduction = action.kind == "REDUCE_GRAD"
        kind: SlotKind = "gradient" if is_reduction else "unsharded_gradient"
        self.gradient_slots = tuple(slot for slot in action.outputs if slot.kind == kind)
        self.owned_gradients = owned_results(action, kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationForward:
    """A stage's forward in one mode of its module, with nothing kept."""

    mode: CapturedMode
    forward: Executable
    reader: MicrobatchReader


class Overlap:
    """The graph of a pair of actions, and what it reads of the state of both stages.

    Args:
        actions: the pair.
        transformed: its graph, as it runs.
    """

    def __init__(self, actions: OverlappedActions, transformed: ActionGraph) -> None:
        self.actions = actions
        self.run: BoxedFunction = boxed(transformed.graph_module)
        self.graph_module = transformed.graph_module
        self.owned_gradients = owned_results(transformed, "unsharded_gradient")
        """For each gradient, whether no other value of this graph shares its memory."""

        self._of_backward: tuple[Tensor, ...] | None = None
        self._of_forward: tuple[Tensor, ...] | None = None
        self._static: tuple[Tensor, ...] = ()

    def static_inputs(
        self, of_backward: tuple[Tensor, ...], of_forward: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """The tensors of the backward, then those of the forward that it does not share."""
        if of_backward is not self._of_backward or of_forward is not self._of_forward:
            own = tuple(of_forward[i] for i in self.actions.forward_static)
            self._static = (*of_backward, *own)
            self._of_backward, self._of_forward = of_backward, of_forward
        return self._static

    def forget(self) -> None:
        """Let go of the state."""
        self._of_backward = self._of_forward = None
        self._static = ()
