"""Check that every functional collective is waited for once, and that nothing reads it before.

The result of a launch is memory that may still be written to. A missing or late wait is a race that
testing rarely shows, so it is read off the graph. A second wait is harmless when it runs, but no
pass has a reason to make one: it is a sign of a collective that was copied by half.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch.fx import Node

from gt_passes.analysis.collectives import is_wait, raw_results
from gt_passes.analysis.graph_scan import GraphScan
from gt_passes.analysis.operator_effects import is_only_a_view, reads_only_metadata
from gt_passes.graph_problem import GraphProblem


def find_wait_problems(
    scan: GraphScan, *, tolerated: Collection[Node] = ()
) -> Iterator[GraphProblem]:
    """Yield a problem for each result that is not waited for exactly once, or read unwaited.

    Args:
        scan: of the graph.
        tolerated: waits that may be one too many, because the captured program has them.
    """
    for launch in scan.launches:
        results = tuple(raw_results(launch))
        if not results:
            yield _never_waited(launch)
        for result in results:
            if len(result.users) == 1 and is_wait(next(iter(result.users))):
                continue  # as of most
            users = [user for user in result.users if not reads_only_metadata(user)]
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
    for wait in find_repeated_waits(scan):
        if wait not in tolerated:
            yield GraphProblem(
                check="collective waits",
                node_name=wait.name,
                target=str(wait.target),
                message="it is not the only wait for this collective",
                expected=f"one wait for {_awaited(wait)}",
                got="several",
            )


def find_repeated_waits(scan: GraphScan) -> Iterator[Node]:
    """Every wait for a result that has another one, or that was already waited for."""
    launches = frozenset(scan.launches)
    for wait in scan.waits:
        for argument in scan.calls[wait].split()[1]:
            if argument in launches and len(argument.users) == 1:
                continue  # as of most
            if len(argument.users) > 1 and sum(map(is_wait, argument.users)) > 1:
                yield wait
                break
            if _is_waited_for(argument):
                yield wait
                break


def _is_waited_for(node: Node) -> bool:
    while is_only_a_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return is_wait(node)


def _awaited(wait: Node) -> str:
    return ", ".join(argument.name for argument in wait.all_input_nodes)


def _never_waited(result: Node) -> GraphProblem:
    return GraphProblem(
        check="collective waits",
        node_name=result.name,
        target=str(result.target),
        message="the result of this collective is never waited for",
        expected=f"wait_tensor({result.name})",
        got="none",
    )
