"""How much memory a graph needs at each of its nodes, estimated from the lifetimes of its values.

Memory is held by storages, not by nodes: a view holds what it views, an in-place operator writes
where something already is. So every node is told which storages its result holds (by the aliasing
that operators declare in their schemas), and a storage lives from the node that makes it to the
last use of the last node that holds it. That is when the executing module lets go, since the code
that FX generates for a graph module sets each variable to None after its last use
(``torch/fx/graph.py``, ``delete_unused_values``). Three things differ:

- Inputs live from beginning to end: whoever calls the graph holds them.
- Outputs live until the end.
- What is given to a functional collective lives until the collective is waited for, because the
  process group holds it so long.

Estimates leave out what operators allocate inside themselves and free again, and what an allocator
loses between blocks; ``block_bytes`` rounds every storage up as the CUDA allocator does.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

from gt_config.node_keys import FsdpCollectiveAnnotation
from gt_passes._torch_internals import OpOverload
from gt_passes.collectives import is_collective, is_wait
from gt_trace.node_metadata import phase_of, read_annotation

__all__ = ["MemoryKind", "MemoryProfile", "estimate_memory", "estimate_peak_bytes"]

MemoryKind = Literal[
    "static inputs",
    "arguments",
    "outputs",
    "gathered parameters",
    "saved for backward",
    "temporaries",
]
"""Why a storage is held; the first that fits.

static inputs: parameters, buffers, and constants of the graph.
arguments: the other inputs.
outputs: made by the graph and returned, as gradients are.
gathered parameters: made by an FSDP unshard.
saved for backward: made by forward or loss and still read by the backward.
temporaries: everything else.
"""

MEMORY_KINDS: tuple[MemoryKind, ...] = (
    "static inputs",
    "arguments",
    "outputs",
    "gathered parameters",
    "saved for backward",
    "temporaries",
)

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """Estimated memory of one run of a graph. Bytes are those of this rank."""

    device_type: str
    """Where the graph computes: ``"cuda"``, or ``"cpu"`` if there is no other."""

    peak_bytes: int
    """Most bytes held at once on the device where the graph computes."""

    peak_node: str
    """Name of the first node at which that is so."""

    bytes_by_kind: Mapping[MemoryKind, int]
    """What is held at the peak; the values add up to ``peak_bytes``."""

    live_bytes: tuple[int, ...]
    """Bytes held while each node runs, in execution order: its arguments and its result too."""

    host_peak_bytes: int
    """Most bytes held at once in host memory, where that is not where the graph computes.
    Tensors that were offloaded count here even if the graph computes on the CPU."""

    num_unsized: int
    """Storages whose size depends on data, that count as nothing."""

    def __str__(self) -> str:
        lines = [f"peak {self.peak_bytes / _GIB:.3f} GiB on {self.device_type} at {self.peak_node}"]
        lines += [
            f"  {kind:<20}{held / _GIB:>9.3f} GiB" for kind, held in self.bytes_by_kind.items()
        ]
        if self.host_peak_bytes:
            lines.append(f"host memory {self.host_peak_bytes / _GIB:.3f} GiB at its peak")
        if self.num_unsized:
            lines.append(f"{self.num_unsized} values without a known size are not counted")
        return "\n".join(lines)


def estimate_peak_bytes(graph_module: GraphModule) -> int:
    """Most bytes that a graph holds at once where it computes; see ``estimate_memory``."""
    return _Liveness(graph_module).peak_bytes()


def estimate_memory(
    graph_module: GraphModule,
    *,
    num_static_inputs: int = 0,
    block_bytes: int = 1,
    symbol_sizes: Mapping[str, int] = MappingProxyType({}),
) -> MemoryProfile:
    """Estimate what memory a graph needs while it runs, and for what. Linear in the graph.

    Args:
        graph_module: with fake values in ``node.meta["val"]``. Symbolic sizes count with their
            hints.
        num_static_inputs: how many leading placeholders hold parameters and buffers.
        block_bytes: every storage is rounded up to a multiple; 512 for the CUDA allocator.
        symbol_sizes: what symbols without a hint stand for, by name (``{"u3": 3072}``). A size
            that depends on any other counts as nothing (``MemoryProfile.num_unsized``).
    """
    return _Liveness(
        graph_module,
        num_static_inputs=num_static_inputs,
        block_bytes=block_bytes,
        symbol_sizes=symbol_sizes,
    ).profile()


Held = int | tuple["Held", ...] | None
"""The storages of a value, in its structure: a number for a tensor, None for what is no tensor."""


class _Storages:
    """What is known of every storage, one list for each property."""

    def __init__(self) -> None:
        self.num_bytes: list[int] = []
        self.birth: list[int] = []
        self.death: list[int] = []
        self.maker: list[Node] = []
        self.on_host: list[bool] = []

    def add(self, num_bytes: int, *, at: int, maker: Node, on_host: bool) -> int:
        self.num_bytes.append(num_bytes)
        self.birth.append(at)
        self.death.append(at)
        self.maker.append(maker)
        self.on_host.append(on_host)
        return len(self.num_bytes) - 1


class _Liveness:
    """Storages and lifetimes of one graph."""

    def __init__(
        self,
        graph_module: GraphModule,
        *,
        num_static_inputs: int = 0,
        block_bytes: int = 1,
        symbol_sizes: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._nodes: list[Node] = list(graph_module.graph.nodes)
        self._num_static_inputs = num_static_inputs
        self._block_bytes = block_bytes
        self._symbol_sizes = symbol_sizes
        self._storages = _Storages()
        self._held: dict[Node, Held] = {}
        self._inputs: list[int] = []
        self._constants: list[int] = []
        self._outputs: list[int] = []
        self._given_to: dict[int, tuple[int, ...]] = {}  # inputs of a collective, by its result
        self._num_unsized = 0
        self._device_type = _compute_device_type(self._nodes)
        self._find_storages()
        self._find_lifetimes()

    def peak_bytes(self) -> int:
        return max(self._live_curve(on_host=False), default=0)

    def profile(self) -> MemoryProfile:
        live = self._live_curve(on_host=False)
        peak_bytes = max(live, default=0)
        at = live.index(peak_bytes) if live else 0
        return MemoryProfile(
            device_type=self._device_type,
            peak_bytes=peak_bytes,
            peak_node=self._nodes[at].name if self._nodes else "",
            bytes_by_kind=self._bytes_by_kind(at),
            live_bytes=tuple(live),
            host_peak_bytes=max(self._live_curve(on_host=True), default=0),
            num_unsized=self._num_unsized,
        )

    def _find_storages(self) -> None:
        for at, node in enumerate(self._nodes):
            if node.op in ("placeholder", "get_attr"):
                held = self._fresh(node, node.meta.get("val"), at=0)
                (self._inputs if node.op == "placeholder" else self._constants).extend(_flat(held))
            elif node.op == "output":
                held = None
                for result in node.all_input_nodes:
                    self._outputs.extend(_flat(self._held[result]))
            else:
                held = self._held_by_call(node, at)
            self._held[node] = held

    def _held_by_call(self, node: Node, at: int) -> Held:
        target, value = node.target, node.meta.get("val")
        if target is operator.getitem:
            source, index = node.args[0], node.args[1]
            held = self._held[source] if isinstance(source, Node) else None
            if isinstance(held, tuple) and isinstance(index, int):
                return held[index]
            return held
        if is_wait(node):
            (launched,) = node.all_input_nodes
            held = self._held[launched]
            for result in _flat(held):
                for given in self._given_to.pop(result, ()):
                    self._storages.death[given] = at
            return held
        sources = _aliases_of(target) if isinstance(target, OpOverload) else None
        if sources is None:
            held = self._fresh(node, value, at=at)
        elif len(sources) == 1:
            held = self._result(node, sources[0], value, at=at)
        else:
            values = value if isinstance(value, (tuple, list)) else ()
            held = tuple(
                self._result(node, source, item, at=at)
                for source, item in zip(sources, values, strict=False)
            )
        if is_collective(node):
            arguments = tuple(
                storage
                for argument in node.all_input_nodes
                for storage in _flat(self._held[argument])
            )
            for result in _flat(held):
                self._given_to[result] = arguments
        return held

    def _result(self, node: Node, source: _Argument | None, value: object, *, at: int) -> Held:
        """What one result holds: the memory of the argument it aliases, or its own."""
        if source is None or not source.may_alias(node):
            return self._fresh(node, value, at=at)
        argument = source.of(node)
        if isinstance(argument, Node):
            held = self._held[argument]
            if isinstance(value, (tuple, list)) and not isinstance(held, tuple):
                return (held,) * len(value)  # the views that a split makes
            return held
        if isinstance(argument, (tuple, list)):
            return tuple(self._held[item] if isinstance(item, Node) else None for item in argument)
        return None

    def _fresh(self, node: Node, value: object, *, at: int) -> Held:
        if isinstance(value, (tuple, list)):
            return tuple(self._fresh(node, item, at=at) for item in value)
        if not isinstance(value, torch.Tensor):
            return None
        num_bytes = _storage_bytes(value, self._symbol_sizes)
        if num_bytes is None:
            self._num_unsized += 1
            num_bytes = 0
        blocks = -(-num_bytes // self._block_bytes)
        on_host = value.device.type == "cpu" and self._device_type != "cpu"
        return self._storages.add(blocks * self._block_bytes, at=at, maker=node, on_host=on_host)

    def _find_lifetimes(self) -> None:
        last_use = {node: at for at, node in enumerate(self._nodes)}
        for at, node in enumerate(self._nodes):
            for argument in node.all_input_nodes:
                last_use[argument] = at
        death = self._storages.death
        for node, held in self._held.items():
            until = last_use[node]
            for storage in _flat(held):
                if death[storage] < until:
                    death[storage] = until
        end = len(self._nodes) - 1
        for storage in (*self._inputs, *self._constants, *self._outputs):
            death[storage] = end
        for pending in self._given_to.values():  # collectives that nobody waits for
            for storage in pending:
                death[storage] = end

    def _live_curve(self, *, on_host: bool) -> list[int]:
        change = [0] * (len(self._nodes) + 1)
        storages = self._storages
        for num_bytes, birth, death, host in zip(
            storages.num_bytes, storages.birth, storages.death, storages.on_host, strict=True
        ):
            if host is on_host:
                change[birth] += num_bytes
                change[death + 1] -= num_bytes
        live, curve = 0, []
        for difference in change[:-1]:
            live += difference
            curve.append(live)
        return curve

    def _bytes_by_kind(self, at: int) -> dict[MemoryKind, int]:
        totals: dict[MemoryKind, int] = dict.fromkeys(MEMORY_KINDS, 0)
        kinds = self._kinds()
        storages = self._storages
        for storage, kind in enumerate(kinds):
            alive = storages.birth[storage] <= at <= storages.death[storage]
            if alive and not storages.on_host[storage]:
                totals[kind] += storages.num_bytes[storage]
        return totals

    def _kinds(self) -> list[MemoryKind]:
        kinds: list[MemoryKind] = ["temporaries"] * len(self._storages.maker)
        for storage in self._saved_for_backward():
            kinds[storage] = "saved for backward"
        for storage, maker in enumerate(self._storages.maker):
            annotation = read_annotation(maker, FsdpCollectiveAnnotation)
            if annotation is not None and annotation.kind == "unshard":
                kinds[storage] = "gathered parameters"
        for storage in self._outputs:
            kinds[storage] = "outputs"
        for position, storage in enumerate(self._inputs):
            static = position < self._num_static_inputs
            kinds[storage] = "static inputs" if static else "arguments"
        for storage in self._constants:
            kinds[storage] = "static inputs"
        return kinds

    def _saved_for_backward(self) -> Iterator[int]:
        backward = {node for node in self._nodes if phase_of(node) == "backward"}
        for node, held in self._held.items():
            if held is None or node in backward or backward.isdisjoint(node.users):
                continue
            for storage in _flat(held):
                if self._storages.maker[storage] not in backward:
                    yield storage


@dataclass(frozen=True, slots=True)
class _Argument:
    """One argument of an operator, of which a result is a view or the same."""

    name: str
    position: int | None
    """None for an argument that is given by name only."""

    unless_training: str | None = None
    """The result is its own if the argument with this name is true."""

    def of(self, node: Node) -> object:
        if self.position is not None and self.position < len(node.args):
            return node.args[self.position]
        return node.kwargs.get(self.name)

    def may_alias(self, node: Node) -> bool:
        if self.unless_training is None:
            return True
        train = node.args[2] if len(node.args) > 2 else node.kwargs.get(self.unless_training)
        return train is False


@functools.cache
def _aliases_of(target: OpOverload) -> tuple[_Argument | None, ...] | None:
    """For each result of an operator the argument whose memory it has; None if all are new."""
    if target is torch.ops.aten._unsafe_view.default:  # its schema promises new memory
        return (_Argument("self", 0),)
    if target is torch.ops.aten.native_dropout.default:
        return (_Argument("input", 0, unless_training="train"), None)
    schema = target._schema
    arguments: dict[str, _Argument] = {}
    aliased: list[_Argument] = []
    for position, declared in enumerate(schema.arguments):
        if declared.alias_info is not None:
            aliased.append(_Argument(declared.name, None if declared.kwarg_only else position))
            arguments |= dict.fromkeys(declared.alias_info.before_set, aliased[-1])
    sources: list[_Argument | None] = []
    for result in schema.returns:
        if result.alias_info is None:
            sources.append(None)
            continue
        labels = sorted(result.alias_info.before_set)
        # PyTorch does not show the labels of lists; such operators have one aliased argument.
        named = (arguments[label] for label in labels if label in arguments)
        sources.append(next(named, next(iter(aliased), None)))
    return tuple(sources) if any(sources) else None


def _flat(held: Held) -> Iterator[int]:
    if isinstance(held, int):
        yield held
    elif held is not None:
        for item in held:
            yield from _flat(item)


def _compute_device_type(nodes: list[Node]) -> str:
    """The first device that is not the host, where there is one."""
    for node in nodes:
        value = node.meta.get("val")
        for leaf in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu":
                return leaf.device.type
    return "cpu"


def _storage_bytes(tensor: torch.Tensor, symbol_sizes: Mapping[str, int]) -> int | None:
    """Bytes of the storage behind a tensor that was just made; None if they are not known."""
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    num_bytes: int | torch.SymInt = tensor.untyped_storage().nbytes()
    if not isinstance(num_bytes, torch.SymInt):
        return num_bytes
    symbolic: Any = num_bytes.node
    if symbolic.has_hint():
        return int(symbolic.hint)
    expression = symbolic.expr
    values = {symbol: symbol_sizes.get(str(symbol)) for symbol in expression.free_symbols}
    return None if None in values.values() else int(expression.xreplace(values))
