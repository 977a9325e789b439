"""Calls that a trace makes again: their nodes are copied from the first of equal calls.

A program that is data, as the plan of a placed model, calls the same few operators on operands of
the same few shapes, layer after layer. Under a trace each call goes through autograd, the
dispatcher, fake kernels and proxies. Here a call is known by its key (a function and its constants)
and by all that a trace can see of its operands. The second of two equal calls gets the nodes of the
first, on its own operands, with its own names, memory, autograd number and annotations: the graph
is the one that the trace would have made. What is not certain to come out so again is traced: calls
that write, draw, make autograd nodes, or have sizes known at run time only.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg
from torch.fx.traceback import get_current_meta

from gt_trace._torch_internals import (
    DisableTorchFunction,
    FakeTensor,
    current_sequence_number,
    get_proxy_mode,
    is_functional,
    is_in_backward,
    name_of_new_node,
    no_dispatch,
    storage_key,
    track,
)
from gt_trace.capture.fake_tensors import fake_over, mapped_tensors, tensors_in

Function = Callable[[Sequence[torch.Tensor]], Sequence[Any]]
"""Takes tensors, and returns tensors and None."""

_VALUES = ("val", "eager_input_vals")
_CONSTANTS = frozenset(
    {"tensor_meta", "stack_trace", "original_aten", "autograd_backward", "is_gradient_acc"}
)
_OWN = frozenset({"custom", "seq_nr"})


@dataclass(slots=True, kw_only=True)
class CallCounts:
    """What became of the calls of one trace."""

    num_calls: int = 0
    num_copied: int = 0


_counts: ContextVar[CallCounts | None] = ContextVar("_counts", default=None)
_known: ContextVar[dict[Hashable, _CallTemplate | None] | None] = ContextVar("_known", default=None)


@contextmanager
def copied_calls() -> Iterator[CallCounts]:
    """Inside, traces copy the nodes of equal calls, and count."""
    counts = CallCounts()
    token = _counts.set(counts)
    try:
        yield counts
    finally:
        _counts.reset(token)


@contextmanager
def calls_of_one_place() -> Iterator[None]:
    """Around a loop that makes calls: only those of one loop have the same stack."""
    if _counts.get() is None:
        yield
        return
    token = _known.set({})
    try:
        yield
    finally:
        _known.reset(token)


def traced_call(
    key: Hashable | None, function: Function, operands: Sequence[torch.Tensor]
) -> Sequence[Any]:
    """``function(operands)``; in a trace with ``copied_calls`` perhaps a copy of an equal call.

    Args:
        key: what is computed, with all constants: two functions of one key do the same with equal
            operands. None: nobody can tell, and it is called.
        function: returns tensors and None; autograd must be off where it is copied.
        operands: all the tensors that it reads.
    """
    known, counts = _known.get(), _counts.get()
    mode = get_proxy_mode() if known is not None and counts is not None else None
    if mode is None or known is None or counts is None:
        return function(operands)
    counts.num_calls += 1
    if key is None or torch.is_grad_enabled():
        return function(operands)
    tracer: Any = mode.tracer
    with DisableTorchFunction():
        seen = _seen(operands, tracer)
    if seen is None:
        return function(operands)
    facts, nodes = seen
    full_key = (key, facts, is_in_backward(), *_told_by_autograd())
    if full_key in known:
        template = known[full_key]
        if template is None:
            return function(operands)
        counts.num_copied += 1
        with no_dispatch(), DisableTorchFunction():
            return template.copied(tracer, operands, nodes)
    last: Node = next(iter(reversed(tracer.graph.nodes)))
    number, annotations = current_sequence_number(), _annotations()
    results = function(operands)
    made = list(takewhile(lambda node: node is not last, reversed(tracer.graph.nodes)))[::-1]
    with DisableTorchFunction():
        is_alike = current_sequence_number() == number and all(
            (node.meta.get("seq_nr"), node.meta.get("custom", {})) == (number, annotations)
            for node in made
        )
        known[full_key] = _template(tracer, made, operands, nodes, results) if is_alike else None
    return results


def _told_by_autograd() -> tuple[Hashable, ...]:
    """What nodes made now take over from autograd's engine."""
    noted = get_current_meta()
    return noted.get("stack_trace"), noted.get("autograd_backward", False)


def _annotations() -> dict[str, Any]:
    return get_current_meta().get("custom") or {}


def _seen(operands: Sequence[torch.Tensor], tracer: Any) -> tuple[Hashable, list[Node]] | None:
    """All that a trace can see of operands, and their nodes; None if that may differ elsewhere."""
    facts: list[Hashable] = []
    nodes: list[Node] = []
    storages: dict[int, int] = {}
    places: dict[Node, int] = {}
    for tensor in operands:
        proxy = tracer.unwrap_proxy(tensor)
        if type(tensor) is not FakeTensor or proxy is tensor or tensor.constant is not None:
            return None
        sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset(), _num_bytes(tensor))
        if any(type(size) is not int for size in sizes):
            return None
        facts.append(
            (
                sizes,
                storages.setdefault(storage_key(tensor), len(storages)),
                places.setdefault(proxy.node, len(places)),
                (tensor.dtype, tensor.device, tensor.layout, tensor.dispatch_keys),
                (tensor.requires_grad, tensor.is_conj(), tensor.is_neg()),
            )
        )
        nodes.append(proxy.node)
    return tuple(facts), nodes


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class _CopiedNode:
    """A node of the first call."""

    node: Node
    name: str | None
    """From which the graph makes a new one; None leaves it to the graph."""

    constants: dict[str, Any]
    """Metadata that is the same for equal calls."""

    values: tuple[tuple[str, Any], ...]
    """Metadata with fake tensors, by key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _CallTemplate:
    """A call of which equal ones can be copied."""

    nodes: tuple[_CopiedNode, ...]
    operand_nodes: tuple[Node, ...]
    storages: dict[int, int]
    """From the memory of a tensor of the first call to the operand that lies in it, or to a number
    from that of operands on for memory that the call makes."""

    results: tuple[int | Node | None, ...]
    """An operand, or what is computed by a node."""

    def copied(
        self, tracer: Any, operands: Sequence[torch.Tensor], operand_nodes: Sequence[Node]
    ) -> Sequence[Any]:
        """The results of a call on other operands, with its nodes in the graph."""
        new = dict(zip(self.operand_nodes, operand_nodes, strict=True))
        memory = dict(enumerate(each.untyped_storage() for each in operands))

        def tensor(old: torch.Tensor) -> torch.Tensor:
            place = self.storages[storage_key(old)]
            if place not in memory:
                memory[place] = torch.UntypedStorage(_num_bytes(old), device="meta")  # type: ignore[no-untyped-call]  # torch's
            element = torch.empty((0,), dtype=old.dtype, device="meta")
            element.set_(memory[place], old.storage_offset(), old.shape, old.stride())
            return fake_over(old, element)

        own: dict[str, Any] = {"seq_nr": current_sequence_number()}
        annotations = _annotations()
        for each in self.nodes:
            node: Node = tracer.graph.create_node(
                "call_function",
                each.node.target,
                map_arg(each.node.args, new.__getitem__),
                map_arg(each.node.kwargs, new.__getitem__),
                each.name,
            )
            new[each.node] = node
            node.meta = {**each.constants, **own}
            if annotations:
                node.meta["custom"] = dict(annotations)
            for key, value in each.values:
                node.meta[key] = mapped_tensors(value, tensor)
        made: dict[Node, torch.Tensor] = {}
        for result in self.results:
            if isinstance(result, Node) and result not in made:
                made[result] = tensor(result.meta["val"])
                track(made[result], new[result], tracer)
        return [
            made[each] if isinstance(each, Node) else None if each is None else operands[each]
            for each in self.results
        ]


def _template(
    tracer: Any,
    made: Sequence[Node],
    operands: Sequence[torch.Tensor],
    operand_nodes: Sequence[Node],
    results: Sequence[Any],
) -> _CallTemplate | None:
    """The template of a call that made the nodes ``made``; None if it cannot be copied."""
    allowed = {*operand_nodes, *made}
    storages: dict[int, int] = {}
    for index, operand in enumerate(operands):
        storages.setdefault(storage_key(operand), index)
    nodes: list[_CopiedNode] = []
    for node in made:
        is_known = is_functional(node.target) or node.target is operator.getitem
        if (
            node.op != "call_function"
            or not is_known
            or not allowed.issuperset(node.all_input_nodes)
        ):
            return None
        if node.meta.keys() - {*_VALUES, *_CONSTANTS, *_OWN}:
            return None
        values = tuple((key, node.meta[key]) for key in _VALUES if key in node.meta)
        for tensor in tensors_in([value for _, value in values]):
            if not isinstance(tensor, FakeTensor) or type(_num_bytes(tensor)) is not int:
                return None
            storages.setdefault(storage_key(tensor), len(operands) + len(storages))
        nodes.append(
            _CopiedNode(
                node=node,
                name=name_of_new_node(tracer.graph, node.target),
                constants={key: node.meta[key] for key in _CONSTANTS if key in node.meta},
                values=values,
            )
        )
    places: list[int | Node | None] = []
    for result in results:
        found = _place(result, tracer, operands, made)
        if found is None and result is not None:
            return None
        places.append(found)
    return _CallTemplate(
        nodes=tuple(nodes),
        operand_nodes=tuple(operand_nodes),
        storages=storages,
        results=tuple(places),
    )


def _place(
    result: Any, tracer: Any, operands: Sequence[torch.Tensor], made: Sequence[Node]
) -> int | Node | None:
    for index, operand in enumerate(operands):
        if result is operand:
            return index
    if not isinstance(result, torch.Tensor):
        return None
    proxy = tracer.unwrap_proxy(result)
    is_made = proxy is not result and proxy.node in made
    return proxy.node if is_made else None
