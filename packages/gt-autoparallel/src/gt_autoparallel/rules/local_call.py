"""What a rank runs on its shards for a node with a chosen option."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils import _pytree as pytree

from gt_autoparallel._torch_internals import HigherOrderOperator
from gt_autoparallel.graph.function_graph import FunctionGraph
from gt_autoparallel.graph.layouts import MeshShape
from gt_autoparallel.graph.options import NodeOption
from gt_autoparallel.graph.placement_graph import PlacementNode, TensorSpec
from gt_autoparallel.rules.operator_call import CallOperand, operator_call
from gt_autoparallel.rules.registry import find_rule
from gt_autoparallel.rules.sharded_call import LocalCall, ShardedCall


def local_call(
    node: PlacementNode,
    option: NodeOption,
    operands: tuple[TensorSpec, ...],
    mesh: MeshShape,
    *,
    coordinate: tuple[int, ...],
) -> LocalCall:
    """What one rank runs in place of an operator node.

    It is a function with arguments in which ``Value``s stand for this rank's shards, laid out as
    the option says. It gives this rank's shards of the outputs, in a flat sequence. The operators
    that it runs and their shapes are the same on every rank. ``coordinate`` has one number for each
    axis.
    """
    call = operator_call(node, operands)
    rule = find_rule(call.target)
    localize = None if rule is None else rule.localize
    local = LocalCall(function=call.target, args=call.args, kwargs=dict(call.kwargs))
    if localize is not None and mesh.num_ranks > 1:
        local = localize(ShardedCall(call=call, option=option, mesh=mesh, coordinate=coordinate))
    values = node.operands

    def named(leaf: Any) -> Any:
        if isinstance(leaf, FunctionGraph):
            return leaf.graph_module()
        return values[leaf.index] if isinstance(leaf, CallOperand) else leaf

    args, kwargs = pytree.tree_map(named, (local.args, local.kwargs))
    function = local.function
    if isinstance(call.target, HigherOrderOperator):
        function = partial(_flattened, function)
    return LocalCall(function=function, args=args, kwargs=kwargs)


def _flattened(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """What a function returns, without the tree that it is in."""
    return tuple(pytree.tree_leaves(function(*args, **kwargs)))
