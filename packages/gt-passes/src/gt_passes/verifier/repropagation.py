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
from typing import Final, NamedTuple

import torch
from torch.fx import GraphModule, Node

from gt_passes._torch_internals import (
    CANNOT_REPROPAGATE,
    FakeTensorMode,
    OpOverload,
    is_fake_tensor,
    quiet_fake_execution,
    value_of,
)
from gt_passes.analysis.graph_scan import GraphScan
from gt_passes.analysis.node_calls import attribute_of, evaluate
from gt_passes.analysis.tensor_signature import describe, is_symbolic, signature
from gt_passes.graph_problem import GraphProblem
from gt_passes.verifier.symbol_renaming import equal_up_to_fresh_symbols

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
    """What of the latest graph could not be re-propagated."""

    _answers: dict[Hashable, Hashable] = field(default_factory=dict)

    _numbers: dict[Hashable, int] = field(default_factory=dict)
    """A number for each signature, to remember calls by: nested tuples are slow to hash."""

    _signed: dict[int, _Signed] = field(default_factory=dict)
    """Recorded values by identity, since the latest look at the whole graph."""

    _right: dict[Node, tuple[object, object, object, list[int | None]]] = field(
        default_factory=dict
    )
    """Calls that were right once: target, arguments, keyword arguments, and the signatures of
    result and inputs. Such a call is right wherever it is seen again."""

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
                if node.op == "call_function":
                    problem = self._problem_of(node, recorded)
                    if problem is not None:
                        yield problem
                elif node.op == "get_attr":
                    yield from _attribute_problems(node, recorded.of(node).signature)
                elif node.op in ("call_module", "call_method"):
                    yield _problem(node, f"captured graphs have no {node.op} nodes")

    def _problem_of(self, node: Node, values: _RecordedValues) -> GraphProblem | None:
        numbers = values.numbers_around(node)
        if numbers is None:
            return None  # used before it is made, as the check of well-formedness says
        has_symbols = None in numbers
        if not has_symbols:
            call = (node.target, node.args, node.kwargs)
            right = self._right.get(node)
            if right is not None and right[3] == numbers and all(map(operator.is_, call, right)):
                return None
        recorded = values.of(node).signature
        key = None if has_symbols and None in numbers[1:] else _call_key(node, values)
        answer = _UNKNOWN if key is None else self._answers.get(key, _UNKNOWN)
        if answer is _UNKNOWN:
            try:
                result = _run(node, values)
            except CANNOT_REPROPAGATE as error:
                self.unverified.append(
                    UnverifiedNode(
                        node_name=node.name, target=str(node.target), reason=_first_line(error)
                    )
                )
                return None
            except Exception as error:  # noqa: BLE001 - whatever an operator says of its inputs
                return _problem(
                    node,
                    "its operator refuses the recorded values of its inputs: "
                    f"{type(error).__name__}: {_first_line(error)}",
                )
            answer = signature(result)
            if numbers[0] is None or is_symbolic(answer):
                if not equal_up_to_fresh_symbols(values.value_of(node), result):
                    return _mismatch(node, recorded, answer)
                return None
            if key is not None:
                self._answers[key] = answer
        if answer != recorded:
            return _mismatch(node, recorded, answer)
        if not has_symbols:
            self._right[node] = (*call, numbers)
        return None


class _Signed(NamedTuple):
    """A recorded value, kept so that no other gets its identity."""

    value: object
    signature: Hashable

    number: int | None
    """The signature's number; None where it has symbolic sizes."""


class _RecordedValues:
    """What is recorded for the nodes of one graph, and its signatures, where somebody asks."""

    def __init__(
        self,
        scan: GraphScan,
        fake_mode: FakeTensorMode,
        *,
        numbers: dict[Hashable, int],
        signed: dict[int, _Signed],
    ) -> None:
        self._scan = scan
        self._numbers = numbers
        self._signed = signed
        self._fake_mode = fake_mode
        self._attributes: dict[Node, object] = {}

    def value_of(self, node: Node) -> object:
        if node.op != "get_attr":
            return self._scan.calls[node].value
        if node not in self._attributes:
            self._attributes[node] = _attribute(self._scan.graph_module, node, self._fake_mode)
        return self._attributes[node]

    def of(self, node: Node) -> _Signed:
        value = self.value_of(node)
        if node.op == "get_attr" and not isinstance(value, torch.Tensor):
            # A subgraph may be edited in place: what it was is no matter of its identity.
            return self._numbered(value, self._scan.attributes[node])
        known = self._signed.get(id(value))
        if known is None:
            known = self._signed[id(value)] = self._numbered(value, signature(value))
        return known

    def _numbered(self, value: object, signed: Hashable) -> _Signed:
        number = self._numbers.get(signed)  # of those without symbols only
        if number is None and not is_symbolic(signed):
            number = self._numbers[signed] = len(self._numbers)
        return _Signed(value, signed, number)

    def numbers_around(self, node: Node) -> list[int | None] | None:
        """The numbers of a node and its inputs; None where an input is not made before it."""
        position = self._scan.position
        index = position[node]
        numbers = [self.of(node).number]
        for source in node.all_input_nodes:
            if position.get(source, index) >= index:
                return None
            numbers.append(self.of(source).number)
        return numbers


def _run(node: Node, values: _RecordedValues) -> object:
    """Run a node's operator on the values of its inputs."""
    changes_metadata = (
        isinstance(node.target, OpOverload) and torch.Tag.inplace_view in node.target.tags
    )

    def value_for(source: Node) -> object:
        value = values.value_of(source)
        if changes_metadata and isinstance(value, torch.Tensor):
            # `t_` and its like would change the recorded value itself.
            return torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            )
        return value

    return evaluate(node, value_for)


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
        number = signatures.of(argument).number  # type: ignore[arg-type]  # as the line above says
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
    value = attribute_of(graph_module, node)
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
