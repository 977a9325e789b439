"""Fake re-propagation: does every node still produce what is recorded for it?

Each operator is run again on the recorded fake values of its inputs, in the graph's own fake mode,
and its answer is compared with the recorded one: structure, shape, stride, dtype, device. A pass
that rewires a graph and forgets to update a value, or updates it wrongly, shows here. The idea is
that of Inductor's ``FakeTensorUpdater`` (``torch/_inductor/fx_utils.py``), used to check instead of
to repair.

A captured model repeats its layers, so what an operator answers is remembered by the form of the
call and the signatures of what it reads: a layer that is like one before it costs a lookup a node.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node

from gt_passes._torch_internals import (
    CANNOT_REPROPAGATE,
    FakeTensorMode,
    fast_tensor_attributes,
    is_fake_tensor,
    is_zero_tensor,
    plain_zeros,
    quiet_fake_execution,
    value_of,
)
from gt_passes.analysis.graph_scan import GraphScan, NodeCall
from gt_passes.analysis.node_calls import attribute_of, evaluate_apart
from gt_passes.analysis.tensor_signature import (
    describe,
    is_symbolic,
    signature,
    tensor_facts,
)
from gt_passes.graph_problem import GraphProblem

_CHECK: Final = "fake re-propagation"
_NO_VALUE: Final = 'no fake value in node.meta["val"]; gt_passes.call_like adds calls that have one'


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

    _answers: dict[Hashable, int] = field(default_factory=dict)
    """The number of what a form of call gives on operands with certain numbers."""

    _numbers: dict[Hashable, int] = field(default_factory=dict)
    """A number for each signature without symbolic sizes: nested tuples are slow to hash."""

    _numbers_of_facts: dict[Hashable, int] = field(default_factory=dict)
    """The same by ``tensor_facts``."""

    _number_of: dict[Node, int | None] = field(default_factory=dict)
    """The number of each node's recorded value when it was last looked at."""

    _calls: Mapping[Node, NodeCall] = field(default_factory=dict)
    """What the nodes stood for then."""

    _is_clean: bool = False
    """Whether each node of those was found to be right, with the numbers that are noted."""

    def find_problems(
        self, scan: GraphScan, fake_mode: FakeTensorMode, *, only: Collection[Node] | None = None
    ) -> Iterator[GraphProblem]:
        """Yield a problem for each node whose recorded value is not what its operator gives.

        Args:
            scan: of the graph.
            fake_mode: that of the recorded values.
            only: nodes to look at, among them all that changed since the latest look, whose scan
                this one was made with; None for all.
        """
        recorded = _RecordedValues(scan, fake_mode)
        calls, number_of = scan.calls, self._number_of
        was_clean, self._is_clean = self._is_clean, False
        if only is None:
            is_as_it_was = calls is self._calls or calls == self._calls
            known = number_of.copy() if was_clean and is_as_it_was else {}
            number_of.clear()
            self._look_at(calls, recorded)  # and see what was written into a recorded value
            if number_of.items() <= known.items() and None not in number_of.values():
                only = _not_told_by_numbers(scan)
        else:
            seen = self._calls.get
            self._look_at(
                [n for n in only if n not in number_of or seen(n) is not calls[n]], recorded
            )
        self._calls = calls
        self.unverified = []
        problems = list(self._problems_of(calls if only is None else only, recorded, fake_mode))
        self._is_clean = (was_clean or only is None) and not (problems or self.unverified)
        yield from problems

    def _problems_of(
        self, nodes: Collection[Node], recorded: _RecordedValues, fake_mode: FakeTensorMode
    ) -> Iterator[GraphProblem]:
        calls, answers, number_of = recorded.scan.calls, self._answers, self._number_of
        with quiet_fake_execution(fake_mode):
            for node in nodes:
                if node.op == "call_function":
                    form, operands = calls[node].split()
                    key = (form, *map(number_of.get, operands))
                    answer = answers.get(key)
                    if answer is not None and answer == number_of[node]:
                        continue
                    problem = self._problem_of(node, recorded)
                    if problem is not None:
                        yield problem
                elif node.op == "get_attr":
                    yield from _attribute_problems(node, recorded.signature_of(node))
                elif node.op in ("call_module", "call_method"):
                    yield _problem(node, f"captured graphs have no {node.op} nodes")

    def _problem_of(self, node: Node, values: _RecordedValues) -> GraphProblem | None:
        form, operands = values.scan.calls[node].split()
        position = values.scan.position
        if any(position.get(each, position[node]) >= position[node] for each in operands):
            return None  # used before it is made, as the check of well-formedness says
        self._look_at([each for each in operands if each not in self._number_of], values)
        numbers = [self._number_of[each] for each in operands]
        answer_number = None
        key = (form, *numbers)
        is_known_call = form.is_exact and None not in numbers
        if is_known_call:
            answer_number = self._answers.get(key)
        if answer_number is None:
            try:
                result = evaluate_apart(node, values.operand_of)
            except CANNOT_REPROPAGATE as error:
                self.unverified.append(
                    UnverifiedNode(
                        node_name=node.name, target=str(node.target), reason=_first_line(error)
                    )
                )
                return None
            except Exception as error:  # noqa: BLE001 - whatever an operator says of its inputs
                return _problem(node, _refusal(operands, values, error))
            answer = signature(result)
            if self._number_of[node] is None or is_symbolic(answer):
                if not equal_up_to_fresh_symbols(values.value_of(node), result):
                    return _mismatch(node, values.signature_of(node), answer)
                return None
            answer_number = self._number(answer)
            assert answer_number is not None  # it has no symbols
            if is_known_call:
                self._answers[key] = answer_number
        if answer_number != self._number_of[node]:
            signatures = {number: signed for signed, number in self._numbers.items()}
            answer = signatures[answer_number]
            if _is_unread_number(node, values.value_of(node), answer):
                return None
            return _mismatch(node, values.signature_of(node), answer)
        return None

    def _look_at(self, nodes: Collection[Node], recorded: _RecordedValues) -> None:
        """Note the numbers of what is recorded for some nodes."""
        calls = recorded.scan.calls
        values = [
            recorded.value_of(node) if node.op == "get_attr" else calls[node].value
            for node in nodes
        ]
        with fast_tensor_attributes():
            facts = list(map(tensor_facts, values))
        known = self._numbers_of_facts
        for node, fact in zip(nodes, facts, strict=True):
            try:
                number = None if fact is None else known.get(fact)
            except TypeError:  # a symbolic size
                fact = number = None
            if number is None:
                number = self._number(recorded.signature_of(node))
                if fact is not None and number is not None:
                    known[fact] = number
            self._number_of[node] = number

    def _number(self, signed: Hashable) -> int | None:
        number = self._numbers.get(signed)
        if number is None and not is_symbolic(signed):
            number = self._numbers[signed] = len(self._numbers)
        return number


class _RecordedValues:
    """What is recorded for the nodes of one graph, and its signatures, where somebody asks."""

    def __init__(self, scan: GraphScan, fake_mode: FakeTensorMode) -> None:
        self.scan = scan
        self._fake_mode = fake_mode
        self._attributes: dict[Node, object] = {}

    def operand_of(self, node: Node) -> object:
        """The recorded value, for an operator to run on.

        Fake kernels give other strides than real ones for tensors that are known to be zero, as
        forward mode makes them.
        """
        value = self.value_of(node)
        return plain_zeros(value) if is_zero_tensor(value) else value

    def value_of(self, node: Node) -> object:
        if node.op != "get_attr":
            return self.scan.calls[node].value
        if node not in self._attributes:
            self._attributes[node] = _attribute(self.scan.graph_module, node, self._fake_mode)
        return self._attributes[node]

    def signature_of(self, node: Node) -> Hashable:
        value = self.value_of(node)
        if node.op == "get_attr" and not isinstance(value, torch.Tensor):
            # A subgraph may be edited in place: what it was is no matter of its identity.
            return self.scan.attributes[node]
        return signature(value)


def _not_told_by_numbers(scan: GraphScan) -> list[Node]:
    """The nodes that may be wrong though each call and each number is what it was.

    The number of a ``get_attr`` node is that of its constant, not of what is recorded for it; and
    a constant argument that cannot be hashed may have changed inside.
    """
    return [
        node
        for node, call in scan.calls.items()
        if node.op == "get_attr" or (node.op == "call_function" and not call.split()[0].is_exact)
    ]


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


def _is_unread_number(node: Node, recorded: object, answer: Hashable) -> bool:
    """Whether a node is a number that nobody reads, such as a length that FlashAttention returns.

    make_fx records nothing for these, and writes them into the calls that use them.
    """
    is_number = isinstance(answer, tuple) and answer[:1] in ((int,), (float,), (bool,))
    return recorded is None and is_number and not node.users


def _mismatch(node: Node, recorded: Hashable, answer: Hashable) -> GraphProblem:
    if recorded is None:
        message = f"it has {_NO_VALUE}"
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


def _refusal(operands: Collection[Node], values: _RecordedValues, error: Exception) -> str:
    """Why an operator could not be run: most often for a new node that has no value yet."""
    bare = [
        each.name
        for each in operands
        if each.op == "call_function" and values.value_of(each) is None
    ]
    reason = f"{type(error).__name__}: {_first_line(error)}"
    if bare:
        return f"its operator cannot be run without a value of {', '.join(bare)}: {reason}"
    return f"its operator refuses the recorded values of its inputs: {reason}"


def _problem(node: Node, message: str) -> GraphProblem:
    return GraphProblem(check=_CHECK, node_name=node.name, target=str(node.target), message=message)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]


# Comparing recorded values that hold data-dependent sizes.
#
# Running ``nonzero`` again gives a fresh size symbol: u7 where u0 is recorded. The two answers
# are the same when one renaming of the fresh symbols makes them equal.
def equal_up_to_fresh_symbols(recorded: object, answer: object) -> bool:
    """Whether two values, or trees of them, agree when fresh symbols of the answer are renamed.

    A symbol of ``answer`` that does not occur in ``recorded`` may stand for one symbol of
    ``recorded``, the same everywhere, and no two for the same one.
    """
    recorded_leaves, answer_leaves = list(_leaves(recorded)), list(_leaves(answer))
    if len(recorded_leaves) != len(answer_leaves):
        return False
    recorded_symbols = {
        symbol for leaf in recorded_leaves for symbol in getattr(leaf, "free_symbols", ())
    }
    renaming: dict[Any, Any] = {}
    for old, new in zip(recorded_leaves, answer_leaves, strict=True):
        if _is_symbol(new) and _is_symbol(old) and new not in recorded_symbols:
            renaming.setdefault(new, old)
        renamed = new.xreplace(renaming) if hasattr(new, "xreplace") else new
        if not _equal(old, renamed):
            return False
    return len(set(renaming.values())) == len(renaming)


def _equal(first: Any, second: Any) -> bool:
    if first == second:
        return True
    # Expressions that multiply out to the same: 2*(s0 + 1) and 2*s0 + 2.
    if not (getattr(first, "free_symbols", None) and getattr(second, "free_symbols", None)):
        return False
    if any(each.is_Boolean or each.is_Relational for each in (first, second)):
        return False
    return bool((first - second).expand() == 0)


def _is_symbol(leaf: Any) -> bool:
    return bool(getattr(leaf, "is_symbol", False))


def _leaves(value: object) -> Iterator[Any]:
    """Sizes as numbers or expressions, everything else as signatures, in a fixed order."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        yield (len(value.shape), value.dtype, value.device)
        for size in (*value.shape, *value.stride(), value.storage_offset()):
            yield _number(size)
    elif isinstance(value, (tuple, list)):
        yield len(value)
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        yield value.node.expr
    else:
        yield signature(value)


def _number(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size
