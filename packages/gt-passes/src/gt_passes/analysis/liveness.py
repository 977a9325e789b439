"""How much memory a graph needs at each of its nodes, estimated from the lifetimes of its values.

A storage (``storages``) lives from the node that makes it to the last use of the last node that
holds it. That is when the executing module lets go, since the code that FX generates for a graph
module sets each variable to None after its last use (``torch/fx/graph.py``,
``delete_unused_values``). Three things differ:

- Inputs live from beginning to end: whoever calls the graph holds them. Those that are released to
  the graph, which alone holds them, are freed after their last use.
- Outputs live until the end.
- What is given to a functional collective lives until the collective is waited for, because the
  process group holds it so long.

Estimates leave out what operators allocate inside themselves and free again, and what an allocator
loses between blocks; ``block_bytes`` rounds every storage up as the CUDA allocator does.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from torch.fx import GraphModule, Node

from gt_passes.analysis.collectives import is_collective
from gt_passes.analysis.fsdp_collective import fsdp_collective
from gt_passes.analysis.host_copies import is_copy_to_host
from gt_passes.analysis.storages import Storages, flat
from gt_trace.node_metadata import phase_of

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
arguments: the other inputs, but for those whose kind the caller knows.
outputs: made by the graph and returned, as gradients are, but for what an FSDP unshard made.
gathered parameters: made by an FSDP unshard.
saved for backward: made by forward or loss and still read by the backward.
temporaries: everything else.
"""

MEMORY_KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)

CUDA_BLOCK_BYTES = 512
"""PyTorch's CUDA allocator rounds every block up to a multiple of this."""

_NO_KINDS: Mapping[Node, MemoryKind] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """Estimated memory of one run of a graph. Bytes are those of this rank."""

    device_type: str
    """Where the graph computes: ``"cuda"``, or ``"cpu"`` if there is no other."""

    peak_bytes: int
    """Most bytes held at once on the device where the graph computes."""

    peak_node: str
    """Name of the first node at which that is so."""

    live_bytes_by_kind: Mapping[MemoryKind, tuple[int, ...]]
    """Bytes held for each reason while each node runs, in execution order: its arguments and its
    result too."""

    host_live_bytes: tuple[int, ...]
    """The same for host memory, where that is not where the graph computes. Tensors that were
    offloaded count here even if the graph computes on the CPU."""

    num_unsized: int
    """Storages whose size depends on data, that count as nothing."""

    @property
    def live_bytes(self) -> tuple[int, ...]:
        """Bytes of all kinds, held while each node runs."""
        return tuple(map(sum, zip(*self.live_bytes_by_kind.values(), strict=True)))

    @property
    def bytes_by_kind(self) -> dict[MemoryKind, int]:
        """What is held at the peak; the values add up to ``peak_bytes``."""
        live = self.live_bytes
        at = live.index(self.peak_bytes) if live else 0
        return {kind: held[at] if held else 0 for kind, held in self.live_bytes_by_kind.items()}

    @property
    def host_peak_bytes(self) -> int:
        """Most bytes held at once in host memory."""
        return max(self.host_live_bytes, default=0)

    def __str__(self) -> str:
        unit, name = (2**30, "GiB") if self.peak_bytes >= 2**30 else (2**20, "MiB")
        lines = [
            f"peak {self.peak_bytes / unit:,.2f} {name} on {self.device_type} at {self.peak_node}"
        ]
        lines += [
            f"  {kind:<20}{held / unit:>10,.2f} {name}" for kind, held in self.bytes_by_kind.items()
        ]
        if self.host_peak_bytes:
            lines.append(f"host memory {self.host_peak_bytes / unit:,.2f} {name} at its peak")
        if self.num_unsized:
            lines.append(f"{self.num_unsized} values without a known size are not counted")
        return "\n".join(lines)


def estimate_peak_bytes(graph_module: GraphModule, *, num_live_microbatches: int = 1) -> int:
    """Most bytes that runs of a graph hold at once where it computes; see ``estimate_memory``.

    Args:
        graph_module: with fake values in ``node.meta["val"]``.
        num_live_microbatches: runs that have saved what their backward will read; one of them
            is running.
    """
    return peak_bytes_of(Storages(graph_module), num_live_microbatches=num_live_microbatches)


def peak_bytes_of(storages: Storages, *, num_live_microbatches: int = 1) -> int:
    """As ``estimate_peak_bytes``, where the storages are known already."""
    lifetimes = _Liveness(storages)
    num_waiting = num_live_microbatches - 1
    return lifetimes.peak_bytes() + (num_waiting * lifetimes.saved_bytes() if num_waiting else 0)


def peak_bytes_made_by(graph_module: GraphModule, makers: Collection[Node]) -> int:
    """Most bytes held at once of what some nodes made; of the device where the graph computes.

    Args:
        graph_module: with fake values in ``node.meta["val"]``.
        makers: of the graph's nodes.
    """
    return _Liveness(Storages(graph_module)).peak_bytes(frozenset(makers))


def estimate_memory(
    graph_module: GraphModule,
    *,
    num_static_inputs: int = 0,
    block_bytes: int = 1,
    symbol_sizes: Mapping[str, int] | None = None,
    released_inputs: Collection[Node] = (),
    input_kinds: Mapping[Node, MemoryKind] = _NO_KINDS,
) -> MemoryProfile:
    """Estimate what memory a graph needs while it runs, and for what. Linear in the graph.

    Args:
        graph_module: with fake values in ``node.meta["val"]``. Symbolic sizes count with their
            hints.
        num_static_inputs: how many leading placeholders hold parameters and buffers.
        block_bytes: every storage is rounded up to a multiple; 512 for the CUDA allocator.
        symbol_sizes: what symbols without a hint stand for, by name (``{"u3": 3072}``); by default
            what they are when every all-to-all gives a rank as much as it takes. A size that
            depends on any other counts as nothing (``MemoryProfile.num_unsized``).
        released_inputs: placeholders that nobody but the graph holds.
        input_kinds: why placeholders are held, where the caller knows it better.
    """
    storages = Storages(graph_module, block_bytes=block_bytes, symbol_sizes=symbol_sizes)
    lifetimes = _Liveness(
        storages,
        num_static_inputs=num_static_inputs,
        released_inputs=released_inputs,
        input_kinds=input_kinds,
    )
    return lifetimes.profile()


class _Liveness:
    """The lifetimes of the storages of one graph."""

    def __init__(
        self,
        storages: Storages,
        *,
        num_static_inputs: int = 0,
        released_inputs: Collection[Node] = (),
        input_kinds: Mapping[Node, MemoryKind] = _NO_KINDS,
    ) -> None:
        self._storages = storages
        self._released = frozenset(released_inputs)
        self._input_kinds = input_kinds
        self._num_static_inputs = num_static_inputs
        self._compute_device = _compute_device_type(storages.device_type)
        self._inputs: list[int] = []
        self._constants: list[int] = []
        self._outputs: list[int] = []
        self._birth = list(storages.made_at)
        self._death = list(storages.made_at)
        self._find_lifetimes()
        self._on_host = [self._is_on_host(storage) for storage in range(len(storages.num_bytes))]

    def peak_bytes(self, makers: frozenset[Node] | None = None) -> int:
        counted = (
            not on_host and (makers is None or maker in makers)
            for on_host, maker in zip(self._on_host, self._storages.maker, strict=True)
        )
        return max(self._live_curve(counted), default=0)

    def saved_bytes(self) -> int:
        """What the forward leaves for the backward, of the device where the graph computes."""
        return sum(
            num_bytes
            for num_bytes, kind, on_host in zip(
                self._storages.num_bytes, self._kinds(), self._on_host, strict=True
            )
            if kind == "saved for backward" and not on_host
        )

    def profile(self) -> MemoryProfile:
        kinds = self._kinds()

        def live_of(kind: MemoryKind) -> tuple[int, ...]:
            of_kind = zip(kinds, self._on_host, strict=True)
            return tuple(
                self._live_curve(each == kind and not on_host for each, on_host in of_kind)
            )

        by_kind = {kind: live_of(kind) for kind in MEMORY_KINDS}
        live = list(map(sum, zip(*by_kind.values(), strict=True)))
        peak_bytes = max(live, default=0)
        at = live.index(peak_bytes) if live else 0
        nodes = self._storages.nodes
        return MemoryProfile(
            device_type=self._compute_device,
            peak_bytes=peak_bytes,
            peak_node=nodes[at].name if nodes else "",
            live_bytes_by_kind=by_kind,
            host_live_bytes=tuple(self._live_curve(self._on_host)),
            num_unsized=self._storages.num_unsized,
        )

    def _find_lifetimes(self) -> None:
        storages, nodes, death = self._storages, self._storages.nodes, self._death
        position = {node: at for at, node in enumerate(nodes)}
        last_use = dict(position)
        for at, node in enumerate(nodes):
            for argument in node.all_input_nodes:
                last_use[argument] = at
            if node.op == "placeholder":
                self._inputs += storages.of(node)
            elif node.op == "get_attr":
                self._constants += storages.of(node)
            elif node.op == "output":
                self._outputs += storages.of_arguments(node)
        for node, held in storages.held.items():
            until = last_use[node]
            if type(held) is int:
                if death[held] < until:
                    death[held] = until
                continue
            for storage in flat(held):
                if death[storage] < until:
                    death[storage] = until
        given_to: dict[int, tuple[int, ...]] = {}  # the arguments of a collective, by its result
        for node in storages.communication:
            if is_collective(node):
                given_to |= dict.fromkeys(storages.of(node), storages.of_arguments(node))
                continue
            for result in storages.of(node):
                for given in given_to.pop(result, ()):
                    death[given] = max(death[given], position[node])
        end = len(nodes) - 1
        for storage in (*self._inputs, *self._constants):
            self._birth[storage] = 0
            if storages.maker[storage] not in self._released:
                death[storage] = end
        never_waited_for = (storage for given in given_to.values() for storage in given)
        for storage in (*self._outputs, *never_waited_for):
            death[storage] = end

    def _is_on_host(self, storage: int) -> bool:
        if self._compute_device != "cpu" and self._storages.device_type[storage] == "cpu":
            return True
        return is_copy_to_host(self._storages.maker[storage])

    def _live_curve(self, counted: Iterable[bool]) -> list[int]:
        """Bytes that are alive at each node, of those storages that count."""
        change = [0] * (len(self._storages.nodes) + 1)
        for num_bytes, birth, death, counts in zip(
            self._storages.num_bytes, self._birth, self._death, counted, strict=True
        ):
            if counts:
                change[birth] += num_bytes
                change[death + 1] -= num_bytes
        return list(itertools.accumulate(change[:-1]))

    def _kinds(self) -> list[MemoryKind]:
        makers = self._storages.maker
        kinds: list[MemoryKind] = ["temporaries"] * len(makers)
        for storage in self._saved_for_backward():
            kinds[storage] = "saved for backward"
        for storage in self._outputs:
            kinds[storage] = "outputs"
        for storage, maker in enumerate(makers):
            annotation = fsdp_collective(maker)
            if annotation is not None and annotation.kind == "unshard":
                kinds[storage] = "gathered parameters"
        for position, storage in enumerate(self._inputs):
            static = position < self._num_static_inputs
            kind = self._input_kinds.get(makers[storage])
            kinds[storage] = kind or ("static inputs" if static else "arguments")
        for storage in self._constants:
            kinds[storage] = "static inputs"
        return kinds

    def _saved_for_backward(self) -> Iterator[int]:
        storages = self._storages
        backward = {node for node in storages.nodes if phase_of(node) == "backward"}
        for node, held in storages.held.items():
            if held is None or node in backward or backward.isdisjoint(node.users):
                continue
            for storage in flat(held):
                if storages.maker[storage] not in backward:
                    yield storage


def _compute_device_type(device_types: list[str]) -> str:
    """The first device that is not the host, where there is one."""
    return next((device_type for device_type in device_types if device_type != "cpu"), "cpu")
