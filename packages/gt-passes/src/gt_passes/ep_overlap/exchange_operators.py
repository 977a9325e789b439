"""Which operators launch a token exchange, and which wait for one.

The scheduler knows nothing of an exchange but these two, so that another implementation of it
(over symmetric memory, with another library) is one registration.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from gt_config.node_keys import EpExchangeAnnotation
from gt_passes._torch_internals import OpOverload, value_of
from gt_passes.analysis.collectives import declare_launch, waits_of
from gt_passes.analysis.operator_effects import declare_pure_operator
from gt_trace.node_metadata import read_annotation

_EXCHANGES: set[object] = {torch.ops._c10d_functional.all_to_all_single.default}


def register_exchange_operator(launch: OpOverload, wait: OpOverload) -> None:
    """Make another pair of operators known as a token exchange.

    Registering says that both compute their results and do nothing else (as
    ``declare_pure_operator`` does): otherwise nothing could be moved past them. The verifier knows
    the pair as well: what is being sent may not be overwritten before the wait.

    Args:
        launch: starts an exchange and returns at once; its first argument is what is sent.
        wait: takes a result of ``launch`` as its first argument, and returns it finished.

    Raises:
        TypeError: one of them is not an operator with its overload, as ``torch.ops.x.y.default``.
        ValueError: ``launch`` is registered with another ``wait``.
    """
    for role, target in (("launch", launch), ("wait", wait)):
        if not isinstance(target, OpOverload):
            raise TypeError(
                f"{role} is {target!r}, not an operator with its overload, as torch.ops.x.y.default"
            )
    declare_launch(launch, wait)
    _EXCHANGES.add(launch)
    for target in (launch, wait):
        declare_pure_operator(target._schema.name)


def is_exchange_launch(node: Node) -> bool:
    """Whether a node starts a token exchange, or one of token counts."""
    return node.op == "call_function" and node.target in _EXCHANGES


def is_exchange_wait(node: Node) -> bool:
    """Whether a node waits for a token exchange, or one of token counts."""
    if node.op != "call_function":
        return False
    launches = filter(None, map(_launch_behind, node.all_input_nodes))
    return any(node in waits_of(launch) for launch in launches)


def is_token_exchange(launch: Node) -> bool:
    """Whether a launch moves tokens, and not only how many of them will come."""
    annotation = read_annotation(launch, EpExchangeAnnotation)
    return annotation is None or annotation.kind == "token_exchange"


def _launch_behind(result: Node) -> Node | None:
    if is_exchange_launch(result):
        return result
    sources = result.all_input_nodes
    takes_item = len(sources) == 1 and isinstance(value_of(sources[0]), (tuple, list))
    return sources[0] if takes_item and is_exchange_launch(sources[0]) else None
