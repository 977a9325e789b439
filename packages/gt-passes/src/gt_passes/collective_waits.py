"""Check that every functional collective is waited for, and that nothing reads it before that.

The result of a launch is memory that may still be written to. A missing or late wait is a race that
testing rarely shows, so it is read off the graph.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from gt_passes.collectives import is_collective, is_wait, raw_results
from gt_passes.graph_problem import GraphProblem

__all__ = ["find_wait_problems"]

_aten = torch.ops.aten
_READS_ONLY_METADATA = frozenset(
    {
        _aten.sym_size.int,
        _aten.sym_stride.int,
        _aten.sym_numel.default,
        _aten.sym_storage_offset.default,
    }
)
"""Known when a collective is launched: sizes do not wait for data."""


def find_wait_problems(graph_module: GraphModule) -> Iterator[GraphProblem]:
    """Yield a problem for each collective result that is never waited for, or read unwaited."""
    for node in graph_module.graph.nodes:
        if not is_collective(node):
            continue
        results = tuple(raw_results(node))
        if not results:
            yield _never_waited(node)
        for result in results:
            users = [user for user in result.users if user.target not in _READS_ONLY_METADATA]
            readers = [user for user in users if not is_wait(user) and user not in results]
            if len(readers) == len(users):
                yield _never_waited(result)
            for reader in readers:
                yield GraphProblem(
                    check="collective waits",
                    node_name=reader.name,
                    target=str(reader.target),
                    message=f"it reads {result.name}, the result of a collective, unwaited",
                    expected=f"a use of wait_tensor({result.name})",
                    got=f"a use of {result.name} itself",
                )


def _never_waited(result: Node) -> GraphProblem:
    return GraphProblem(
        check="collective waits",
        node_name=result.name,
        target=str(result.target),
        message="the result of this collective is never waited for",
        expected=f"at least one wait_tensor({result.name})",
        got="none",
    )
