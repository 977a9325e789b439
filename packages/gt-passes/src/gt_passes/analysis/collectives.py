"""Which nodes launch a collective, which wait for one, and how many bytes are given to it.

A functional collective returns at once, with memory that the network may still be writing;
``_c10d_functional.wait_tensor`` makes it readable. Source: PyTorch,
``torch/distributed/_functional_collectives.py``. Other libraries' operators that come in such pairs
are declared here, so that nothing takes the memory that they still read.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from gt_passes._torch_internals import OpOverload, value_of

FUNCTIONAL_COLLECTIVES = frozenset({"_c10d_functional", "_c10d_functional_autograd"})
"""Namespaces of operators that launch a collective or wait for one."""

_WAIT_NAMES = frozenset({"wait_tensor", "wait_tensors"})

_WAIT_OF_DECLARED: dict[object, OpOverload] = {}


def declare_launch(launch: OpOverload, wait: OpOverload) -> None:
    """Say of an operator outside PyTorch that its argument is read until another one was called.

    It is no functional collective: only what it reads while in flight becomes known.

    Args:
        launch: returns at once, and goes on reading its arguments.
        wait: takes a result of ``launch``; what ``launch`` was given is free once it returns.

    Raises:
        ValueError: ``launch`` is a functional collective, or was declared, with another wait.
    """
    if launch.namespace in FUNCTIONAL_COLLECTIVES:
        known = torch.ops._c10d_functional.wait_tensor.default
    else:
        known = _WAIT_OF_DECLARED.setdefault(launch, wait)
    if known is not wait:
        raise ValueError(f"{launch} is registered already, with the wait {known}")


def is_declared_launch(node: Node) -> bool:
    """Whether a node launches what ``declare_launch`` declared."""
    return node.op == "call_function" and node.target in _WAIT_OF_DECLARED


def waits_of(launch: Node) -> Iterator[Node]:
    """The nodes that wait for a launch, one for each of its results if all is well.

    Args:
        launch: a node for which ``is_collective`` or ``is_declared_launch`` holds.
    """
    declared = _WAIT_OF_DECLARED.get(launch.target)
    for result in raw_results(launch):
        for user in result.users:
            if is_wait(user) if declared is None else user.target is declared:
                yield user


def is_wait(node: Node) -> bool:
    """Whether a node waits for a functional collective."""
    return _functional_collective_name(node) in _WAIT_NAMES


def is_collective(node: Node) -> bool:
    """Whether a node launches a functional collective, whose result must be waited for."""
    name = _functional_collective_name(node)
    return name is not None and name not in _WAIT_NAMES


def is_pure_collective(node: Node) -> bool:
    """Whether a node launches a collective into fresh memory: neither in place nor point-to-point.

    Point-to-point operations pair up between ranks that run different graphs.
    """
    if not is_collective(node):
        return False
    assert isinstance(node.target, OpOverload)  # what is_collective just saw
    name = _functional_collective_name(node)
    return not node.target._schema.is_mutable and name not in {"isend", "irecv", "batch_p2p_ops"}


def raw_results(collective: Node) -> Iterator[Node]:
    """The nodes of tensors still being written: the launch, or its items if it has many.

    Args:
        collective: a node for which ``is_collective`` or ``is_declared_launch`` holds.
    """
    if not isinstance(value_of(collective), (tuple, list)):
        yield collective
        return
    for user in collective.users:
        if user.target is operator.getitem:
            yield user


def collective_bytes(graph_module: GraphModule) -> int:
    """Bytes that this rank gives to and takes from all collectives of a graph.

    The larger of input and output of each: the gathered bytes of an all-gather, the bytes before
    reduction of a reduce-scatter. Symbolic sizes count with their hints, and as nothing without.
    """
    return sum(launch_bytes(node) for node in graph_module.graph.nodes if is_collective(node))


def launch_bytes(launch: Node) -> int:
    """Bytes that this rank gives to or takes from one collective; see ``collective_bytes``."""
    taken = _num_bytes(value_of(launch))
    room = launch.kwargs.get("out")  # for what is taken
    given = sum(
        _num_bytes(value_of(argument))
        for argument in launch.all_input_nodes
        if argument is not room
    )
    return max(taken, given)


def _functional_collective_name(node: Node) -> str | None:
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return None
    known = _names.get(id(target))
    if known is None:
        is_functional = target.namespace in FUNCTIONAL_COLLECTIVES
        name = target._schema.name.split("::")[1] if is_functional else None
        known = _names[id(target)] = (target, name)
    return known[1]


_names: dict[int, tuple[OpOverload, str | None]] = {}
"""The names of operators by identity, for which they are kept: operators are slow to hash."""


def _num_bytes(value: object) -> int:
    if isinstance(value, (tuple, list)):
        return sum(map(_num_bytes, value))
    if not isinstance(value, torch.Tensor):
        return 0
    numel: object = value.numel()  # an int, or a symbolic one that PyTorch declares as int
    if isinstance(numel, torch.SymInt):
        numel = numel.node.hint if numel.node.has_hint() else 0
    assert isinstance(numel, int)
    return numel * value.element_size()
