"""Whether two captures of one step are the same, in everything that a pass or a run can see."""

from __future__ import annotations

import dataclasses
from operator import attrgetter
from typing import Any

import torch
from torch.fx import GraphModule, Node

from gt_trace._torch_internals import HigherOrderOperator, OpOverload, storage_key
from gt_trace.capture.traced_step import TracedStep
from gt_trace.stamping.fake_values import items_alike
from gt_trace.stamping.subgraphs import subgraph_difference

_SEEN_APART = frozenset({"val", "eager_input_vals", "tensor_meta", "seq_nr", "unbacked_bindings"})
_FIELDS = (
    "inputs",
    "state",
    "state_layouts",
    "arguments",
    "argument_spec",
    "output_spec",
    "output_layouts",
)


def step_differences(ours: TracedStep, theirs: TracedStep) -> list[str]:
    """What differs between two captures: empty if they are the same.

    Compared are inputs, layouts, state and outputs of the steps; of the graphs the nodes in order
    with names, operators, operands, all metadata, fake values (sizes, strides, dtypes, memory that
    they share) and the generated code. Symbols may be named otherwise, and autograd numbers begin
    elsewhere, as in two traces of one model.

    Returns:
        One line for each kind of difference, with the first place and how often it occurs.
    """
    found = _Differences()
    for name in _FIELDS:
        if getattr(ours, name) != getattr(theirs, name):
            where = _first_unequal(getattr(ours, name), getattr(theirs, name))
            found.add(f"TracedStep.{name}", where)
    nodes = list(ours.graph_module.graph.nodes)
    others = list(theirs.graph_module.graph.nodes)
    if len(nodes) != len(others):
        found.add("number of nodes", f"{len(nodes)} and {len(others)}")
        return found.lines()
    _GraphComparison(found, nodes, others).run()
    for index, (one, other) in enumerate(
        zip(ours.example_inputs, theirs.example_inputs, strict=True)
    ):
        if _plain_facts(one) != _plain_facts(other):
            found.add("example inputs", f"{index}: {one} and {other}")
    if ours.graph_module.code != theirs.graph_module.code:
        found.add("generated code", "")
    return found.lines()


class _Differences:
    def __init__(self) -> None:
        self._places: dict[str, list[str]] = {}

    def add(self, kind: str, where: str) -> None:
        self._places.setdefault(kind, []).append(where)

    def lines(self) -> list[str]:
        return [
            f"{kind}{f' ({len(places)} times)' if len(places) > 1 else ''}: {places[0]}"
            for kind, places in self._places.items()
        ]


class _GraphComparison:
    """Walks two graphs side by side."""

    def __init__(self, found: _Differences, nodes: list[Node], others: list[Node]) -> None:
        self._found = found
        self._pairs = list(zip(nodes, others, strict=True))
        self._same = dict(self._pairs)
        self._symbols: dict[Any, Any] = {}
        self._memory: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self._bases: dict[str, tuple[int, int]] = {}

    def run(self) -> None:
        for node, other in self._pairs:
            for kind, problem in self._node(node, other):
                self._found.add(kind, f"{node.name}: {problem}")

    def _node(self, node: Node, other: Node) -> list[tuple[str, str]]:
        problems: list[tuple[str, str]] = []

        def check(kind: str, same: bool, problem: str) -> None:
            if not same:
                problems.append((kind, problem))

        check("names", node.name == other.name, other.name)
        check("operators", node.op == other.op and node.target == other.target, str(other.target))
        check("operands", self._operands(node.args, other.args), f"{node.args} and {other.args}")
        check("keyword operands", self._operands(node.kwargs, other.kwargs), str(other.kwargs))
        keys = (node.meta.keys(), other.meta.keys())
        check("kinds of metadata", keys[0] == keys[1], f"{list(keys[0])} and {list(keys[1])}")
        # Bindings first: they pair the symbols that values then use.
        bindings = [tuple(n.meta.get("unbacked_bindings", {}).items()) for n in (node, other)]
        check("symbols bound", self._bindings(*bindings), f"{bindings[0]} and {bindings[1]}")
        for key in ("val", "eager_input_vals", "tensor_meta"):
            one, two = node.meta.get(key), other.meta.get(key)
            check(key, self._values(one, two), f"{one} and {two}")
        numbers = (node.meta.get("seq_nr"), other.meta.get("seq_nr"))
        check(
            "autograd numbers", self._numbers(node.op, *numbers), f"{numbers[0]} and {numbers[1]}"
        )
        for key in node.meta.keys() - _SEEN_APART:
            one, two = node.meta[key], other.meta.get(key)
            check(key, same_constant(one, two), f"{one!r} and {two!r}")
        if node.op == "get_attr" and other.op == "get_attr":
            roots = node.graph.owning_module, other.graph.owning_module
            held, others = (attrgetter(str(node.target))(root) for root in roots)
            problems += self._attributes(held, others)
        return problems

    def _attributes(self, ours: Any, theirs: Any) -> list[tuple[str, str]]:
        if not isinstance(ours, GraphModule) or not isinstance(theirs, GraphModule):
            return [] if _equal_data(ours, theirs) else [("attributes", f"{ours} and {theirs}")]
        difference = subgraph_difference(ours, theirs)
        if difference is not None:
            return [("subgraphs", difference)]
        problems: list[tuple[str, str]] = []
        for node, other in zip(ours.graph.nodes, theirs.graph.nodes, strict=True):
            held = [n.meta.get("custom") for n in (node, other)]
            if held[0] != held[1]:
                problems.append(("annotations in subgraphs", f"{held[0]} and {held[1]}"))
        return problems

    def _operands(self, ours: Any, theirs: Any) -> bool:
        if isinstance(ours, Node):
            return isinstance(theirs, Node) and self._same[ours] is theirs
        if type(ours) is not type(theirs):
            return False
        if isinstance(ours, list | tuple | dict):
            return items_alike(ours, theirs, self._operands)
        return repr(ours) == repr(theirs)

    def _bindings(self, ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> bool:
        if [path for _, path in ours] != [path for _, path in theirs]:
            return False
        self._symbols.update(
            (one, other) for (one, _), (other, _) in zip(ours, theirs, strict=True)
        )
        return True

    def _numbers(self, op: str, ours: Any, theirs: Any) -> bool:
        if ours is None or theirs is None:
            return ours is theirs
        base = self._bases.setdefault(op, (ours, theirs))
        return bool(ours - base[0] == theirs - base[1])

    def _values(self, ours: Any, theirs: Any) -> bool:
        if type(ours) is not type(theirs):
            return False
        if isinstance(ours, torch.Tensor):
            return _plain_facts(ours) == _plain_facts(theirs) and self._tensors(ours, theirs)
        if isinstance(ours, torch.SymInt | torch.SymBool | torch.SymFloat):
            return bool(ours.node.expr.xreplace(self._symbols) == theirs.node.expr)
        if isinstance(ours, list | tuple | dict):
            return items_alike(ours, theirs, self._values)
        return bool(ours == theirs)

    def _tensors(self, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
        sizes = [
            (*t.shape, *t.stride(), t.storage_offset(), t.untyped_storage().nbytes())
            for t in (ours, theirs)
        ]
        memory = [
            known.setdefault(storage_key(t), len(known))
            for known, t in zip(self._memory, (ours, theirs), strict=True)
        ]
        return memory[0] == memory[1] and self._values(*sizes)


def _equal_data(ours: Any, theirs: Any) -> bool:
    """Whether two constant tensors of graphs hold the same; anything else is the same as itself."""
    if ours is theirs or not all(isinstance(each, torch.Tensor) for each in (ours, theirs)):
        return ours is theirs
    return _plain_facts(ours) == _plain_facts(theirs) and torch.equal(ours, theirs)


def same_constant(ours: Any, theirs: Any) -> bool:
    """Whether two values in nodes' metadata, of which none is a tensor or size, are the same."""
    if isinstance(ours, OpOverload | HigherOrderOperator):
        # An operator is copied for each node, and a copy is not equal to it.
        return str(ours) == str(theirs)
    return type(ours) is type(theirs) and bool(ours == theirs)


def _plain_facts(value: Any) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    return (
        type(value),
        value.dtype,
        value.device,
        value.dim(),
        value.requires_grad,
        value.is_conj(),
        value.is_neg(),
    )


def _first_unequal(ours: Any, theirs: Any) -> str:
    if isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            if one != other:
                if dataclasses.is_dataclass(one):
                    return f"[{index}] {_fields(one)} and {_fields(other)}"
                return f"[{index}] {one!r} and {other!r}"
    return f"{str(ours)[:200]} and {str(theirs)[:200]}"


def _fields(value: Any) -> str:
    return str({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})[
        :300
    ]
