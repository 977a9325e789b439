"""Fake re-propagation: does every node still produce what is recorded for it?

Each operator is run again on the recorded fake values of its inputs, in the graph's own fake mode,
and its answer is compared with the recorded one: structure, shape, stride, dtype, device. A pass
that rewires a graph and forgets to update a value, or updates it wrongly, shows here. The idea is
that of Inductor's ``FakeTensorUpdater`` (``torch/_inductor/fx_utils.py``), used to check instead of
to repair.

A captured model repeats its layers, so answers are remembered by operator and input signatures:
most nodes cost one dictionary lookup.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from gt_passes._torch_internals import (
    CANNOT_REPROPAGATE,
    FakeTensorMode,
    OpOverload,
    is_fake_tensor,
    quiet_fake_execution,
    value_of,
)
from gt_passes.graph_problem import GraphProblem
from gt_passes.graph_scan import GraphScan
from gt_passes.symbol_renaming import equal_up_to_fresh_symbols
from gt_passes.tensor_signature import describe, is_symbolic, signature

__all__ = ["Repropagator", "UnverifiedNode"]

_UNKNOWN: Final = object()
_CHECK: Final = "fake re-propagation"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnverifiedNode:
    """A node whose operator could not be run on fake values, so nothing is known about it."""

    node_name: str
    target: str
    reason: str

    def __str__(self) -> str:
        return f"{self.node_name} ({self.target}): {self.reason}"


@dataclass(slots=True)
class Repropagator:
    """Re-propagates graphs, and remembers the answers of operators between them.

    Use one for graphs of one fake mode; it is not safe to share between threads.
    """

    unverified: list[UnverifiedNode] = field(default_factory=list)
    """Of the latest graph: what could not be re-propagated."""

    _answers: dict[Hashable, Hashable] = field(default_factory=dict)

    _numbers: dict[Hashable, int] = field(default_factory=dict)
    """Of signatures, in which calls are remembered: nested tuples are slow to hash."""

    _signed: dict[int, tuple[object, Hashable]] = field(default_factory=dict)
    """By identity of a recorded value: the value, and its signature since the latest look at the
    whole graph."""

    def find_problems(
        self, scan: GraphScan, fake_mode: FakeTensorMode, *, only: Iterable[Node] | None = None
    ) -> Iterator[GraphProblem]:
        """Yield a problem for each node whose recorded value is not what its operator gives.

        Args:
            scan: of the graph.
            fake_mode: that of the recorded values.
            only: nodes to look at; None for all.
        """
        self.unverified = []
        if only is None:
            self._signed.clear()  # what was written into a recorded value is seen now
        recorded = _RecordedValues(scan, fake_mode, numbers=self._numbers, signed=self._signed)
        with quiet_fake_execution(fake_mode):
            for node in scan.calls if only is None else only:
                if node.op == "get_attr":
                    yield from _attribute_problems(node, recorded.signature_of(node))
                elif node.op == "call_function":
                    yield from self._node_problems(node, recorded)
                elif node.op in ("call_module", "call_method"):
                    yield _problem(node, f"captured graphs have no {node.op} nodes")

    def _node_problems(self, node: Node, values: _RecordedValues) -> Iterator[GraphProblem]:
        if not values.precede(node):
            return  # used before it is made, as the check of well-formedness says
        recorded = values.signature_of(node)
        key = _call_key(node, values)
        if key is not None and key in self._answers:
            answer = self._answers[key]
            if answer != recorded:
                yield _mismatch(node, recorded, answer)
            return
        try:
            result = _run(node, values)
        except CANNOT_REPROPAGATE as error:
            self.unverified.append(
                UnverifiedNode(
                    node_name=node.name, target=str(node.target), reason=_first_line(error)
                )
            )
            return
        except Exception as error:  # noqa: BLE001 - whatever an operator says of its inputs
            yield _problem(
                node,
                "its operator refuses the recorded values of its inputs: "
                f"{type(error).__name__}: {_first_line(error)}",
            )
            return
        answer = signature(result)
        if values.number_of(node) is not None and not is_symbolic(answer):
            if key is not None:
                self._answers[key] = answer
            if answer != recorded:
                yield _mismatch(node, recorded, answer)
        elif not equal_up_to_fresh_symbols(values.value_of(node), result):
            yield _mismatch(node, recorded, answer)


class _RecordedValues:
    """What is recorded for the nodes of one graph, and its signatures, where somebody asks."""

    def __init__(
        self,
        scan: GraphScan,
        fake_mode: FakeTensorMode,
        *,
        numbers: dict[Hashable, int],
        signed: dict[int, tuple[object, Hashable]],
    ) -> None:
        self._scan = scan
        self._numbers = numbers
        self._number_of: dict[Node, int | None] = {}
        self._fake_mode = fake_mode
        self._values: dict[Node, object] = {}
        self._signed = signed

    def value_of(self, node: Node) -> object:
        if node not in self._values:
            recorded = self._scan.calls[node].value
            if node.op == "get_attr":
                recorded = _attribute(self._scan.graph_module, node, self._fake_mode)
            self._values[node] = recorded
        return self._values[node]

    def signature_of(self, node: Node) -> Hashable:
        value = self.value_of(node)
        known = self._signed.get(id(value))
        if known is None:
            # The value is kept, so that no other gets its identity.
            known = self._signed[id(value)] = (value, signature(value))
        return known[1]

    def number_of(self, node: Node) -> int | None:
        """A number for the signature of a node; None where it has symbolic sizes."""
        found = self._number_of.get(node, _UNKNOWN)
        if found is _UNKNOWN:
            signed = self.signature_of(node)
            number = self._numbers.get(signed)  # of those without symbols only
            if number is None and not is_symbolic(signed):
                number = self._numbers[signed] = len(self._numbers)
            self._number_of[node] = number
            return number
        return found  # type: ignore[return-value]  # what is not _UNKNOWN is what was put in

    def precede(self, node: Node) -> bool:
        """Whether all inputs of a node are made before it."""
        position = self._scan.position
        index = position[node]
        return all(position.get(argument, index) < index for argument in node.all_input_nodes)


def _run(node: Node, values: _RecordedValues) -> object:
    """Run a node's operator on the values of its inputs."""
    changes_metadata = (
        isinstance(node.target, OpOverload) and torch.Tag.inplace_view in node.target.tags
    )

    def load(leaf: Any) -> Any:
        if not isinstance(leaf, Node):
            return leaf
        value = values.value_of(leaf)
        if changes_metadata and isinstance(value, torch.Tensor):
            # `t_` and its like would change the recorded value itself.
            return torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            )
        return value

    args: Any = map_aggregate(node.args, load)
    kwargs: Any = map_aggregate(node.kwargs, load)
    assert callable(node.target)  # true of call_function nodes, which lint has seen
    return node.target(*args, **kwargs)


def _call_key(node: Node, signatures: _RecordedValues) -> Hashable | None:
    """What an operator's answer depends on; None where it may depend on more, or on symbols."""
    if node.target is operator.getitem:  # as cheap as the lookup
        return None
    parts: list[Hashable] = [node.target]
    for argument in node.args:
        part = _frozen(argument, signatures)
        if part is None:
            return None
        parts.append(part)
    if node.kwargs:
        part = _frozen(node.kwargs, signatures)
        if part is None:
            return None
        parts.append((dict, part))  # nothing that stands for an argument begins so
    return tuple(parts)


def _frozen(argument: object, signatures: _RecordedValues) -> Hashable | None:
    kind = type(argument)
    if kind is Node:
        number = signatures.number_of(argument)  # type: ignore[arg-type]  # as the line above says
        return None if number is None else (Node, number)
    if kind is int:
        return (int, argument)
    if isinstance(argument, (tuple, list)):
        items = [_frozen(item, signatures) for item in argument]
        return None if None in items else tuple(items)
    if isinstance(argument, dict):
        return _frozen(tuple(argument.items()), signatures)
    if argument is None:
        return (type(None),)
    try:
        hash(argument)
    except TypeError:  # a symbolic size, or an object that opted out
        return None
    # 1, 1.0 and True are equal and hash alike, but operators tell them apart.
    return (type(argument), argument)


def _attribute(graph_module: GraphModule, node: Node, fake_mode: FakeTensorMode) -> object:
    """What a get_attr node stands for: a constant, faked, or a subgraph."""
    value: object = graph_module
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    if isinstance(value, torch.Tensor) and not is_fake_tensor(value):
        return fake_mode.from_tensor(value, static_shapes=True)
    return value


def _attribute_problems(node: Node, actual: Hashable) -> Iterator[GraphProblem]:
    recorded = value_of(node)
    if isinstance(recorded, torch.Tensor) and signature(recorded) != actual:
        yield _mismatch(node, signature(recorded), actual)


def _mismatch(node: Node, recorded: Hashable, answer: Hashable) -> GraphProblem:
    if recorded is None:
        message = 'it has no fake value in node.meta["val"]'
    else:
        message = "its recorded fake value is not what its operator gives on its inputs"
    return GraphProblem(
        check=_CHECK,
        node_name=node.name,
        target=str(node.target),
        message=message,
        expected=describe(answer),
        got=None if recorded is None else describe(recorded),
    )


def _problem(node: Node, message: str) -> GraphProblem:
    return GraphProblem(check=_CHECK, node_name=node.name, target=str(node.target), message=message)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
