"""A stage's graphs ready to run, transformed, with what they read of its state."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.fx import GraphModule

from gt_config.node_keys import PipelineAction
from gt_passes import PassContext, Verifier
from gt_passes.verifier.verifier import GraphInterface
from gt_pipeline.errors import StageGraphError
from gt_pipeline.graph._torch_internals import FakeTensorMode
from gt_pipeline.graph.action_graph import ActionGraph, copied
from gt_pipeline.graph.gradient_accumulators import GradientAccumulators, owned_results
from gt_pipeline.graph.recorded_actions import RecordedAction, SlotMemory, StageRecordings
from gt_pipeline.graph.slots import SlotKind
from gt_trace import boxed
from gt_trace.capture.captured_mode import as_captured

GraphTransform = Callable[[GraphModule, PipelineAction, PassContext], object]
"""Edits the graph of one kind of action in place: a recipe of passes, a compiler. It keeps what the
graph takes and gives."""


def transformed(
    action: ActionGraph,
    transform: GraphTransform | None,
    *,
    fake_mode: FakeTensorMode,
    verify: bool,
) -> ActionGraph:
    """A copy of an action whose graph the transform has edited; the action stays as it is.

    Where there is no transform, or nothing to edit, the action itself.

    Raises:
        StageGraphError: it takes or gives something else now, or is broken.
    """
    if transform is None or action.is_empty:
        return action
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
    """An action's graph, ready to run; ``recordings`` are of its stage, if it may be recorded."""

    def __init__(self, action: ActionGraph, recordings: StageRecordings | None = None) -> None:
        self.action = action
        kind: SlotKind = "unsharded_gradient"
        self.gradient_slots = tuple(slot for slot in action.outputs if slot.kind == kind)
        self.owned_gradients = owned_results(action, kind)
        """For each gradient, whether no other value of this graph shares its memory."""

        slots = (at for at, slot in enumerate(action.outputs) if slot.kind == kind)
        self._gradients_at = next(slots, 0)
        self._run = boxed(action.graph_module)
        self._recorded = (
            None if recordings is None else RecordedAction.of(action, self._run, recordings)
        )

    def run(self, inputs: list[Tensor]) -> Sequence[Tensor]:
        """Run it on tensors in the order of its slots; the list is emptied."""
        with as_captured():
            return self._run(inputs)

    def run_microbatch(
        self,
        inputs: list[Tensor],
        sums: GradientAccumulators,
        *,
        forward: SlotMemory | None = None,
        backward: SlotMemory | None = None,
    ) -> Sequence[Tensor]:
        """Run it for a microbatch, or for two: add gradients to ``sums``, return the other results.

        Args:
            inputs: as for ``run``.
            sums: of the stage whose backward it runs.
            forward: place of the microbatch whose forward it runs, if it runs one.
            backward: the same of a backward.
        """
        if self._recorded is not None:
            found = self._recorded(inputs, sums, forward=forward, backward=backward)
            if found is not None:
                return found
        results = self.run(inputs)
        if not self.gradient_slots:
            return results
        # Gradients stand together: last in a backward, and before the forward of a pair.
        first, behind = self._gradients_at, self._gradients_at + len(self.gradient_slots)
        sums.add(results[first:behind], self.owned_gradients)
        return [*results[:first], *results[behind:]]
