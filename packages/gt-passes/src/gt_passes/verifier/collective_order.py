"""The sequence of collectives of a graph, as text that must be the same on every rank.

A collective completes when all ranks of its group have launched it. If two ranks launch two
collectives of one group in different orders, or those of two groups in orders that wait for each
other, all ranks hang, and no single graph shows it. A graph of a regular mesh launches the same
sequence on every rank, over all groups together; that is what is compared here, and it is more than
what avoiding a deadlock needs. Ranks that run different graphs on purpose, as stages of a pipeline
do, are compared among those that run the same one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch.fx import GraphModule, Node

from gt_config.node_keys import FsdpCollectiveAnnotation
from gt_passes._torch_internals import OpOverload, value_of
from gt_passes.analysis.outlined_region import nodes_with_bodies
from gt_passes.analysis.process_groups import GroupIdentity, group_identity, group_name_of
from gt_trace.node_metadata import module_fqn, phase_of, read_annotation

_EXCHANGES_KEY = "gt_passes.exchanges"
"""In ``node.meta`` of launches; of no meaning outside this module."""

_SPLIT_SIZES = frozenset({"output_split_sizes", "input_split_sizes"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """One collective, as this rank launches it."""

    node_name: str
    group_name: str

    text: str
    """Operator, group, sizes, dtypes, reduction, which parameters or module it is for, and which
    exchanges of the captured graph it stands for: all that must be the same on every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSequence:
    """All collectives of a graph, over all process groups, in execution order.

    Plain data: it can be pickled, and outlives the process groups that it was made with.
    """

    calls: tuple[CollectiveCall, ...]

    @classmethod
    def of(cls, graph_module: GraphModule) -> CollectiveSequence:
        """The sequence of a graph; to be taken while its process groups exist.

        Every operator that is given a process group counts, those that communicate and return the
        finished result as well. Waits do not: launches alone decide who meets whom.
        """
        return cls(calls=tuple(_calls(graph_module)))

    @property
    def text(self) -> str:
        """One line a collective."""
        return "".join(f"{call.text}\n" for call in self.calls)

    @property
    def digest(self) -> str:
        """SHA-256 of the text, in hexadecimal: the same in every process."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveDifference:
    """The first place at which two ranks would launch different collectives."""

    position: int
    """How many collectives they launch alike before."""

    ranks: tuple[int, int]
    calls: tuple[CollectiveCall | None, CollectiveCall | None]
    """What each of the ranks launches; None where it launches no more."""

    def __str__(self) -> str:
        lines = [f"collective {self.position} is not the same on every rank:"]
        for rank, call in zip(self.ranks, self.calls, strict=True):
            if call is None:
                lines.append(f"  rank {rank} launches no more")
            else:
                lines.append(
                    f"  rank {rank} launches {call.text} "
                    f"(node {call.node_name}, group {call.group_name!r})"
                )
        return "\n".join(lines)


def collective_digest(graph_module: GraphModule) -> str:
    """One number for the whole sequence of collectives of a graph, equal on ranks that agree.

    Returns:
        64 hexadecimal digits.
    """
    return CollectiveSequence.of(graph_module).digest


def compare_collective_sequences(
    sequences: Mapping[int, CollectiveSequence],
) -> tuple[CollectiveDifference, ...]:
    """Where ranks would launch other collectives than the first of them.

    Args:
        sequences: by global rank.

    Returns:
        For each rank that differs from the lowest one, the first difference; empty when all agree.
    """
    ranks = sorted(sequences)
    differences = []
    for rank in ranks[1:]:
        found = _first_difference(
            (ranks[0], rank), (sequences[ranks[0]].calls, sequences[rank].calls)
        )
        if found is not None:
            differences.append(found)
    return tuple(differences)


def note_exchanges(exchanges: Mapping[Node, tuple[str, ...]]) -> None:
    """Let the sequence say which exchanges each launch stands for, and not only how large it is.

    A bucket in which two equal-shaped values changed places is a right graph for itself, as long as
    its parts are read accordingly. It is wrong if other ranks have theirs in another order.

    Args:
        exchanges: by launch; see ``gt_passes.verifier.dataflow.check_dataflow.Dataflow.exchanges``.
    """
    for launch, names in exchanges.items():
        launch.meta[_EXCHANGES_KEY] = names


def _first_difference(
    ranks: tuple[int, int],
    sequences: tuple[Sequence[CollectiveCall], Sequence[CollectiveCall]],
) -> CollectiveDifference | None:
    for position, (one, other) in enumerate(zip_longest(*sequences)):
        if one is None or other is None or one.text != other.text:
            return CollectiveDifference(position=position, ranks=ranks, calls=(one, other))
    return None


def _calls(graph_module: GraphModule) -> Iterator[CollectiveCall]:
    symbols: dict[str, str] = {}  # data-dependent sizes, in order of appearance
    groups: dict[str, GroupIdentity] = {}
    for node in nodes_with_bodies(graph_module):
        name = group_name_of(node)
        if name is None:
            continue
        if name not in groups:
            groups[name] = group_identity(name)
        yield CollectiveCall(
            node_name=node.name,
            group_name=name,
            text=f"{_operator_name(node)} over {groups[name]}: "
            f"{_arguments(node, symbols)}{_purpose(node)}{_exchanges(node)}",
        )


def _exchanges(node: Node) -> str:
    names = node.meta.get(_EXCHANGES_KEY)
    return f", exchange {' and '.join(names)}" if names else ""


def _purpose(node: Node) -> str:
    """What the values are for: two that look alike must not meet each other on two ranks."""
    annotation = read_annotation(node, FsdpCollectiveAnnotation)
    if annotation is not None:
        return f", {annotation.kind} of {', '.join(annotation.parameter_names)}"
    module = module_fqn(node)
    return f", {phase_of(node) or 'no phase'} of {module}" if module else ""


def _operator_name(node: Node) -> str:
    assert isinstance(node.target, OpOverload)  # group_name_of has looked
    return str(node.target).removesuffix(".default")


def _arguments(node: Node, symbols: dict[str, str]) -> str:
    assert isinstance(node.target, OpOverload)
    parts = []
    for position, declared in enumerate(node.target._schema.arguments):
        if declared.name == "group_name":
            continue
        if position < len(node.args) and not declared.kwarg_only:
            value: object = node.args[position]
        else:
            value = node.kwargs.get(declared.name, declared.default_value)
        if declared.name in _SPLIT_SIZES:
            parts.append(f"{declared.name}={_split_sizes(value)}")
        elif "all_to_all" in str(node.target) and declared.name == "input":
            # How many rows a rank gives is its own affair.
            parts.append(f"input={_row(value, symbols)}")
        else:
            parts.append(f"{declared.name}={_text(value, symbols)}")
    return ", ".join(parts)


def _split_sizes(sizes: Any) -> str:
    """An exchange's, in which ranks may give and take different numbers of rows."""
    if all(isinstance(size, int) for size in sizes) and len(set(sizes)) <= 1:
        return f"{len(sizes)} x {sizes[0] if sizes else 0}"
    return f"{len(sizes)} sizes, each rank its own"


def _row(value: object, symbols: dict[str, str]) -> str:
    recorded = value_of(value) if isinstance(value, Node) else value
    if isinstance(recorded, torch.Tensor):
        sizes = ", ".join(["rows", *(_size(size, symbols) for size in recorded.shape[1:])])
        return f"{_dtype(recorded)}[{sizes}]"
    return _text(value, symbols)


def _text(value: object, symbols: dict[str, str]) -> str:
    if isinstance(value, Node):
        value = value_of(value)
    if isinstance(value, torch.Tensor):
        return f"{_dtype(value)}[{', '.join(_size(size, symbols) for size in value.shape)}]"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_text(item, symbols) for item in value) + "]"
    if isinstance(value, torch.SymInt):
        return _size(value, symbols)
    return repr(value) if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _size(size: int | torch.SymInt, symbols: dict[str, str]) -> str:
    if not isinstance(size, torch.SymInt):
        return str(size)
    expression: Any = size.node.expr
    # By the numbers in their names, which are in the order in which tracing met them.
    names = sorted(
        (str(symbol) for symbol in expression.free_symbols), key=lambda name: (len(name), name)
    )
    for name in names:
        symbols.setdefault(name, f"n{len(symbols)}")
    renamed = expression.xreplace(
        {
            symbol: type(symbol)(symbols[str(symbol)], integer=True)
            for symbol in expression.free_symbols
        }
    )
    return str(renamed)
