"""Remove views and copies that change nothing, and make chains of views short.

Tracing leaves ``detach`` and ``alias`` wherever autograd was, ``view`` to the shape that a tensor
already has, ``t`` of ``t``, and casts to the dtype at hand. Later passes look through fewer kinds
of node afterwards, and the interpreter of the graph has fewer to call.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from gt_config.graph_kinds import EVERY_GRAPH, GraphKind
from gt_config.node_keys import ChunkAnnotation
from gt_config.numerics import Numerics
from gt_passes._torch_internals import OpOverload, value_of
from gt_passes.analysis.aliasing import AliasClasses
from gt_passes.analysis.forward_sweep import ForwardSweep
from gt_passes.analysis.operator_aliases import only_makes_views
from gt_passes.analysis.tensor_signature import TensorSignature, is_symbolic, signature
from gt_passes.contract import GraphPass, PassContext, PassReport, Refusal
from gt_passes.registry import register_pass
from gt_trace.node_metadata import read_annotation

_aten = torch.ops.aten
_COPIES = frozenset({_aten._to_copy.default, _aten.clone.default, _aten.lift_fresh_copy.default})
_FOLLOWED = frozenset(
    {
        *(_aten._conj.default, _aten.conj.default, _aten.positive.default),
        *(_aten.alias.default, _aten.detach.default, _aten.lift_fresh.default),
        *(_aten.view.default, _aten._unsafe_view.default, _aten.expand.default),
        *(_aten.permute.default, _aten.transpose.int, _aten.t.default),
        *(_aten.select.int, _aten.slice.Tensor, _aten.narrow.default, _aten.unsqueeze.default),
        *(_aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims),
        *(_aten.view_as_complex.default, _aten.view_as_real.default),
    }
)
"""Views that the verifier's dataflow follows. Others stay, since it would refuse their fold.
``as_strided`` addresses the whole storage, which differs between inputs of equal strides."""

_MAX_CHAIN_LENGTH = 16  # how far up a chain of views an equal one is looked for: keeps it linear


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class CanonicalizeViews(GraphPass):
    """Fold views and copies that change nothing, compose the rest, and spell views one way.

    A view is its storage, offset, sizes, strides, dtype and conjugation, nothing else. So one whose
    recorded metadata equals that of a tensor that it is a view of, over any number of steps, *is*
    that tensor: this one rule covers ``detach``, ``alias``, full slices, identity ``view``,
    ``expand`` and ``permute``, ``t`` of ``t``, ``squeeze`` of ``unsqueeze``.

    *Before*::

        d = aten.detach(x)
        c = aten._to_copy(d, dtype=float32)     # x is float32
        v = aten.view(c, [8, 4])
        u = aten._unsafe_view(v, [32])
        p = aten.transpose(aten.permute(y, [2, 0, 1]), 0, 1)

    *After*, for a contiguous ``x``::

        u = aten.view(x, [32])
        p = aten.permute(y, [0, 2, 1])

    *Refuses*: to make an output out of an input or of another output, where the graph returned a
    tensor of its own (callers write to outputs, and tell them apart); to fold a copy when anything
    writes to its memory or to that of its source, or when the source is a small part of a larger
    storage that the copy allows to be freed; to touch a tensor whose own shape an operator like
    ``t_`` changes; to remove the boundary of a chunk.

    *Preserves numerics*: yes. Strides stay as they are, also where they address one element, so
    that every kernel sees the operands it saw before.
    """

    name: ClassVar[str] = "canonicalize-views"
    numerics: ClassVar[Numerics] = "bitwise"
    runs_on: ClassVar[frozenset[GraphKind]] = EVERY_GRAPH
    only_cleans_up: ClassVar[bool] = True

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        """Canonicalize views; see the class."""
        return _Canonicalization(graph_module.graph).run()


class _Canonicalization:
    """One run of the pass."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._sweep = ForwardSweep(graph)
        self._aliases = AliasClasses(graph)
        (output,) = graph.find_nodes(op="output")
        self._returned = set(output.all_input_nodes)
        self._signatures: dict[Node, Hashable] = {}
        self._skipped: list[Node] = []  # what a view was made of that no longer is
        self._refusals: list[Refusal] = []
        self._counts = dict.fromkeys(
            ("views_folded", "copies_folded", "views_composed", "views_respelled"), 0
        )

    def run(self) -> PassReport:
        for node in self._sweep:
            if node.op != "call_function" or not isinstance(node.target, OpOverload):
                continue
            if node.target in _COPIES:
                self._visit_copy(node)
            elif _is_view(node):
                self._visit_view(node)
        _erase_unused(self._graph, self._skipped)
        counts = {name: count for name, count in self._counts.items() if count}
        return PassReport.of(counts, self._refusals)

    def _visit_view(self, node: Node) -> None:
        if self._aliases.is_reshaped(node):
            self._refuse(node, "an operator changes the shape of a tensor that shares its memory")
            return
        if node.target is _aten._unsafe_view.default:
            # The same at run time; but the schema of `view` says that the memory is shared.
            node.target = _aten.view.default
            self._counts["views_respelled"] += 1
        equal = self._equal_ancestor(node)
        if equal is None:
            self._compose(node)
        elif _is_chunk_boundary(node):
            self._refuse(node, "it is the boundary of a chunk")
        elif node in self._returned and (equal in self._returned or _is_input(equal)):
            self._refuse(node, f"it is an output of its own, and {equal.name} is one or an input")
        else:
            self._fold(node, equal, "views_folded")

    def _visit_copy(self, node: Node) -> None:
        source = _source(node)
        if source is None or node.kwargs.get("pin_memory"):
            return
        signed = self._signature(source)
        if signed is None or signed != self._signature(node):
            return
        reason = self._reason_to_keep_copy(node, source)
        if reason is not None:
            self._refuse(node, reason)
            return
        self._aliases.merge(source, node)
        self._fold(node, source, "copies_folded")

    def _reason_to_keep_copy(self, node: Node, source: Node) -> str | None:
        aliases = self._aliases
        if aliases.is_written(node) or aliases.is_written(source):
            return f"the memory of this copy or of its source {source.name} is written to"
        if aliases.holds_output(node) and aliases.holds_input(source):
            return "an output would share the memory of an input"
        if aliases.holds_output(node) and aliases.holds_output(source):
            return "two outputs would share their memory"
        if not _fills_storage(source):
            return f"its source {source.name} is part of a larger storage"
        return "it is the boundary of a chunk" if _is_chunk_boundary(node) else None

    def _fold(self, node: Node, into: Node, count: str) -> None:
        if node in self._returned:
            self._returned.add(into)
        self._skipped.extend(node.all_input_nodes)
        self._sweep.replace(node, by=into)
        self._counts[count] += 1

    def _refuse(self, node: Node, reason: str) -> None:
        self._refusals.append(Refusal(node_name=node.name, reason=reason))

    def _equal_ancestor(self, node: Node) -> Node | None:
        """A tensor that the node is a view of, over any number of views, and equal to."""
        signed = self._signature(node)
        if signed is None:
            return None
        ancestor: Node | None = node
        for _ in range(_MAX_CHAIN_LENGTH):
            if ancestor is None or ancestor.target not in _FOLLOWED:
                return None
            ancestor = _source(ancestor)
            if ancestor is not None and self._signature(ancestor) == signed:
                return ancestor
            if _has_fewer_elements(ancestor, node):  # a part, expanded over a dim of stride 0
                return None
        return None

    def _compose(self, node: Node) -> None:
        """Let a view of a view read the tensor behind both, where one view can do what they do."""
        inner = _source(node)
        if inner is None or not _is_view(inner) or _is_chunk_boundary(inner):
            return
        base = _source(inner)
        if base is None:
            return
        if node.target is inner.target is _aten.view.default:
            # Between contiguous tensors every reshape is a view.
            if not (self._is_contiguous(base) and self._is_contiguous(node)):
                return
            node.update_arg(0, base)
        else:
            outer_order, inner_order = _dim_order(node), _dim_order(inner)
            if outer_order is None or inner_order is None or len(inner.users) > 1:
                return
            node.target = _aten.permute.default
            node.args = (base, [inner_order[dim] for dim in outer_order])
        self._skipped.append(inner)
        self._counts["views_composed"] += 1

    def _signature(self, node: Node) -> Hashable | None:
        """The signature of a node's tensor; None where it has none."""
        if node not in self._signatures:
            value = value_of(node)
            self._signatures[node] = signature(value) if isinstance(value, torch.Tensor) else None
        return self._signatures[node]

    def _is_contiguous(self, node: Node) -> bool:
        signed = self._signature(node)
        if not isinstance(signed, TensorSignature) or signed.stride is None or is_symbolic(signed):
            return False
        expected = 1
        for size, stride in zip(reversed(signed.shape), reversed(signed.stride), strict=True):
            if stride != expected:
                return False
            assert isinstance(size, int)  # not symbolic
            expected *= size
        return True


def _is_view(node: Node) -> bool:
    """Whether a node makes one tensor that is a view of its first argument."""
    target = node.target
    if not isinstance(target, OpOverload) or not isinstance(value_of(node), torch.Tensor):
        return False
    return only_makes_views(target)


def _source(node: Node) -> Node | None:
    """The tensor that a view or copy is made of."""
    source = node.args[0] if node.args else None
    return source if isinstance(source, Node) else None


def _dim_order(node: Node) -> list[int] | None:
    """The order in which a permutation takes the dims of its input; None for other nodes."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        return None
    order = list(range(value.dim()))
    if node.target is _aten.t.default:
        return order[::-1]
    if node.target is _aten.transpose.int:
        first, second = node.args[1:]
        assert isinstance(first, int)  # by its schema, as is the second
        assert isinstance(second, int)
        order[first], order[second] = order[second], order[first]
        return order
    if node.target is _aten.permute.default:
        dims = node.args[1]
        assert isinstance(dims, (list, tuple))  # by its schema
        return [order[dim] for dim in dims if isinstance(dim, int)]
    return None


def _fills_storage(node: Node) -> bool:
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or is_symbolic(signature(value)):
        return False
    return value.untyped_storage().nbytes() == value.numel() * value.element_size()


def _has_fewer_elements(node: Node | None, other: Node) -> bool:
    one, two = (None if each is None else value_of(each) for each in (node, other))
    if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor):
        return False
    sizes = one.numel(), two.numel()
    return all(type(size) is int for size in sizes) and sizes[0] < sizes[1]


def _is_input(node: Node) -> bool:
    return node.op in ("placeholder", "get_attr")


def _is_chunk_boundary(node: Node) -> bool:
    chunk = read_annotation(node, ChunkAnnotation)
    return chunk is not None and chunk.role != "body"


def _erase_unused(graph: Graph, candidates: Iterable[Node]) -> None:
    """Erase the candidates that nobody reads any more, if they are views or sizes, and so on up."""
    worklist = list(candidates)
    erased: set[Node] = set()
    while worklist:
        node = worklist.pop()
        is_erasable = _is_view(node) or node.target is _aten.sym_size.int
        if node in erased or node.users or not is_erasable:
            continue
        worklist += node.all_input_nodes
        graph.erase_node(node)
        erased.add(node)
