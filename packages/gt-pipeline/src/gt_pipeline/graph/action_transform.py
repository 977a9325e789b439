"""Passes and compilers on the graph of an action, held to what it takes and gives."""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import GraphModule

from gt_config.node_keys import PipelineAction
from gt_passes import PassContext, Verifier
from gt_passes.verifier.verifier import GraphInterface
from gt_pipeline.errors import StageGraphError
from gt_pipeline.graph._torch_internals import FakeTensorMode
from gt_pipeline.graph.action_graph import ActionGraph, copied

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
