"""Check that every collective and host copy is waited for once, and that nothing reads it before.

The result of a launch is memory that may still be written to. A missing or late wait is a race that
testing rarely shows, so it is read off the graph. A second wait is harmless when it runs, but no
pass has a reason to make one: it is a sign of a collective that was copied by half.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch.fx import Node

from gt_passes.analysis.collectives import is_wait, raw_results
from gt_passes.analysis.graph_scan import GraphScan
from gt_passes.analysis.host_copies import copy_source, starts_host_copy, waits_for_copy
from gt_passes.analysis.node_calls import arguments_of
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
    yield from _host_copy_problems(scan)
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


def _host_copy_problems(scan: GraphScan) -> Iterator[GraphProblem]:
    """Yield a problem for each copy to or from the host that is not waited for as it must be."""
    for node in scan.host_copies:
        if starts_host_copy(node):
            yield from _started_copy_problems(node)
            continue
        arguments = arguments_of(node)
        copy, source = arguments["copy"], arguments["source"]
        if not isinstance(copy, Node) or not starts_host_copy(copy):
            yield _copy_problem(node, f"it waits for {copy}, which starts no copy", "a wait")
        elif source is not copy_source(copy):
            yield _copy_problem(
                node,
                f"it names {source} as what {copy.name} copies, whose memory is then not kept",
                f"wait_copy({copy.name}, {copy_source(copy)})",
            )


def _started_copy_problems(start: Node) -> Iterator[GraphProblem]:
    waits = list(waits_for_copy(start))
    if not waits:
        yield _copy_problem(start, "this copy is never waited for", _wait_for(start))
    for wait in waits[1:]:
        yield _copy_problem(wait, f"it is not the only wait for {start.name}", "one wait")
    for reader in start.users:
        if reader not in waits and not reads_only_metadata(reader):
            yield _copy_problem(
                reader, f"it reads {start.name}, a copy in flight, unwaited", _wait_for(start)
            )


def _wait_for(start: Node) -> str:
    return f"a use of wait_copy({start.name}, {copy_source(start)})"


def _copy_problem(node: Node, message: str, expected: str) -> GraphProblem:
    return GraphProblem(
        check="copy waits",
        node_name=node.name,
        target=str(node.target),
        message=message,
        expected=expected,
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
