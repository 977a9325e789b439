"""Differences between the documents of ranks of a mesh, and one document for all of them.

Documents of ranks at different places are compared node by node. Process groups, meshes and devices
have names that mean the same on every rank, so that most documents are equal. A number that differs
may follow from the place of a rank (``coordinate_rules``). It then becomes a value by coordinate.
With any other difference the ranks cannot share a document.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gt_trace.artifacts.coordinate_rules import (
    CoordinateRule,
    encoded_rule,
    proving_ranks,
    rule_of,
)

Path = tuple[str | int, ...]
"""A path in a document: keys of objects and positions in lists."""

_ARGUMENTS = (3, 4)
"""Positions of the arguments in a node, those without and those with names."""

_NAME = 1
_META = 5
_OFFSET = 3
_REFERENCES = frozenset({"n", "op"})
"""Lists that begin so name another node or an operator by its position: no number of a rank's."""

_MOST_EXAMPLES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDifference:
    """One place at which two documents differ."""

    path: Path
    ours: Any
    theirs: Any

    @property
    def is_number(self) -> bool:
        """Whether both are integers that a rule may replace.

        These are arguments of nodes, and offsets of pieces of tensors in memory.
        """
        is_int = type(self.ours) is int and type(self.theirs) is int
        return is_int and (_is_argument(self.path) or _is_offset(self.path))

    def __str__(self) -> str:
        where = "/".join(map(str, self.path))
        return f"{where}: {_short(self.ours)} and {_short(self.theirs)}"


def document_differences(ours: Any, theirs: Any) -> list[RankDifference]:
    """Return every place at which two documents differ, in order. Names of nodes do not count.

    Where lists differ in length, or objects in their keys, they are one difference as a whole.
    """
    return list(_differences(ours, theirs, ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of comparing documents of some ranks of a mesh."""

    rules: Mapping[Path, CoordinateRule]
    """Numbers that follow from the place of a rank, by their paths."""

    unruled: Sequence[RankDifference]
    """Differences that follow no rule, one for each path. Empty if all ranks can share a document.
    """

    @property
    def rule_axes(self) -> tuple[str, ...]:
        """The axes from which numbers follow, in alphabetical order."""
        return tuple(sorted({axis for rule in self.rules.values() for axis in rule.steps}))

    def reason(self) -> str:
        """Return a few of the differences that follow no rule, as text; "" without any."""
        return "; ".join(map(str, self.unruled[:_MOST_EXAMPLES]))


def compare_documents(
    documents: Mapping[int, Any], places: Mapping[int, Mapping[str, int]]
) -> Comparison:
    """Compare documents of some ranks, and find the numbers that follow from their places.

    A rule is given only if the ranks of ``proving_ranks`` are among those that are compared.

    Args:
        documents: by rank. The others are compared with the one of the lowest rank.
        places: coordinates of every rank that is to share a document, by axis.
    """
    origin, *others = sorted(documents)
    found: dict[Path, dict[int, RankDifference]] = {}
    for rank in others:
        for difference in document_differences(documents[origin], documents[rank]):
            found.setdefault(difference.path, {})[rank] = difference
    ranks = sorted(places)
    proving = (ranks[n] for n in proving_ranks([places[rank] for rank in ranks]))
    is_provable = documents.keys() >= {*proving}
    rules: dict[Path, CoordinateRule] = {}
    unruled: list[RankDifference] = []
    for path, by_rank in found.items():
        first = next(iter(by_rank.values()))
        odd = next((each for each in by_rank.values() if not each.is_number), None)
        rule = None
        if odd is None and is_provable:
            numbers = dict.fromkeys(documents, first.ours)
            numbers |= {rank: each.theirs for rank, each in by_rank.items()}
            rule = rule_of([(places[rank], number) for rank, number in numbers.items()])
        if rule is None:
            unruled.append(odd or first)
        else:
            rules[path] = rule
    return Comparison(rules=rules, unruled=unruled)


def with_rules(document: Any, rules: Mapping[Path, CoordinateRule]) -> Any:
    """Return a copy of a document with values by coordinate at the paths of ``rules``."""
    return _replaced(document, (), {path: encoded_rule(rule) for path, rule in rules.items()})


def _differences(ours: Any, theirs: Any, path: Path) -> Iterator[RankDifference]:
    if type(ours) is not type(theirs):
        yield RankDifference(path=path, ours=ours, theirs=theirs)
    elif isinstance(ours, dict):
        if list(ours) != list(theirs):
            yield RankDifference(path=path, ours=list(ours), theirs=list(theirs))
            return
        for key, each in ours.items():
            yield from _differences(each, theirs[key], (*path, key))
    elif isinstance(ours, list):
        if ours == theirs:
            return
        if len(ours) != len(theirs) or _is_reference(ours) or _is_reference(theirs):
            yield RankDifference(path=path, ours=ours, theirs=theirs)
            return
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from _differences(one, other, (*path, index))
    elif ours != theirs and not _is_name(path):
        yield RankDifference(path=path, ours=ours, theirs=theirs)


def _is_reference(item: Sequence[Any]) -> bool:
    return bool(item) and isinstance(item[0], str) and item[0] in _REFERENCES


def _is_name(path: Path) -> bool:
    """Whether that is the name of a node: a trace numbers pieces that it then does not need."""
    return len(path) >= 3 and path[-3] == "nodes" and path[-1] == _NAME


def _is_argument(path: Path) -> bool:
    return _inside_node(path)[:1] in [(each,) for each in _ARGUMENTS]


def _is_offset(path: Path) -> bool:
    """Whether that is the last item of a fake tensor, in metadata of a node."""
    inside = _inside_node(path)
    return len(inside) > 3 and inside[0] == _META and inside[-1] == _OFFSET


def _inside_node(path: Path) -> Path:
    """The path from the node on; empty outside of nodes."""
    if "nodes" not in path:
        return ()
    return path[len(path) - path[::-1].index("nodes") + 1 :]


def _replaced(item: Any, path: Path, values: Mapping[Path, Any]) -> Any:
    if not values:
        return item
    if path in values:
        return values[path]
    inner = {at: value for at, value in values.items() if at[: len(path)] == path}
    if not inner:
        return item
    if isinstance(item, dict):
        return {key: _replaced(each, (*path, key), inner) for key, each in item.items()}
    if isinstance(item, list):
        return [_replaced(each, (*path, index), inner) for index, each in enumerate(item)]
    return item


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
