"""In what documents of ranks at different places of a mesh differ, and documents for all of them.

What a graph depends on is found by comparison: captures of ranks that stand at different places are
laid side by side, node by node. Process groups, meshes and devices have names that mean the same on
every rank, so that most graphs are equal. Numbers that are not may follow where a rank stands
(``coordinate_rules``), and become values by coordinate. Whatever else differs makes the ranks
unlike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gt_trace.artifacts.coordinate_rules import (
    CoordinateRule,
    SumFinder,
    decoded_rule,
    encoded_rule,
    only_rule_of_an_axis,
)

Path = tuple[str | int, ...]
"""Where something stands in a document: keys of objects and positions in lists."""

_ARGUMENTS = (3, 4)
"""Where a node has its arguments, by position and by name."""

_NAME = 1
_META = 5
_OFFSET = 3
_REFERENCES = frozenset({"n", "op"})
"""Lists that begin so name another node or an operator by its position: no number of a rank's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDifference:
    """One place at which two documents differ."""

    path: Path
    ours: Any
    theirs: Any

    @property
    def is_number(self) -> bool:
        """Whether both are integers, where a rule may stand in their place.

        Those are arguments of nodes, and where in its memory a piece of a tensor begins.
        """
        is_int = type(self.ours) is int and type(self.theirs) is int
        return is_int and (_is_argument(self.path) or _is_offset(self.path))

    def __str__(self) -> str:
        where = "/".join(map(str, self.path))
        return f"{where}: {_short(self.ours)} and {_short(self.theirs)}"


def document_differences(ours: Any, theirs: Any) -> list[RankDifference]:
    """Every place at which two documents differ, in order; names of nodes do not count.

    Where lists differ in length, or objects in their keys, they are one difference as a whole.
    """
    return list(_differences(ours, theirs, ()))


def rules_of(
    captures: Sequence[tuple[Mapping[str, int], Any]], places: Sequence[Mapping[str, int]]
) -> tuple[dict[Path, CoordinateRule], list[RankDifference]]:
    """How the numbers that differ follow from places on a mesh, as far as the captures tell.

    A rule of one axis is given only if all captures have it, and no rule of another axis that would
    give some rank another number. Those of ranks that ``telling_ranks`` names leave no doubt. A
    rule of several axes is given only if, besides, no function of places whatever that has squares
    and products of coordinates would do: ranks that ``telling_ranks_of_sums`` names exclude them.

    Args:
        captures: coordinates of a rank by axis, and its document; the others are compared with the
            first.
        places: coordinates of every rank that the rules are for.

    Returns:
        The rules, by place in the document, and one difference for each place that follows none.
    """
    (origin, first), *others = captures
    sums = SumFinder([place for place, _ in captures], places)
    found: dict[Path, dict[int, RankDifference]] = {}
    for number, (_, document) in enumerate(others):
        for difference in document_differences(first, document):
            found.setdefault(difference.path, {})[number] = difference
    rules: dict[Path, CoordinateRule] = {}
    unruled: list[RankDifference] = []
    for path, seen in found.items():
        some = next(iter(seen.values()))
        odd = next((each for each in seen.values() if not each.is_number), None)
        points = [(origin, some.ours)]
        points += [
            (place, seen[number].theirs if number in seen else some.ours)
            for number, (place, _) in enumerate(others)
        ]
        rule = None
        if odd is None:
            rule = only_rule_of_an_axis(points, places) or sums.rule([value for _, value in points])
        if rule is None:
            unruled.append(odd or some)
        else:
            rules[path] = rule
    return rules, unruled


def with_rules(document: Any, rules: Mapping[Path, CoordinateRule]) -> Any:
    """A copy of a document with values by coordinate in the places of ``rules``."""
    return _replaced(document, (), {path: encoded_rule(rule) for path, rule in rules.items()})


def at_coordinates(document: Any, coordinates: Mapping[str, int]) -> Any:
    """A copy of a document as the rank at these coordinates has it."""
    if isinstance(document, dict):
        return {key: at_coordinates(each, coordinates) for key, each in document.items()}
    if not isinstance(document, list):
        return document
    if document and document[0] == "by" and len(document) > 3:
        return decoded_rule(document).at(coordinates)
    return [at_coordinates(each, coordinates) for each in document]


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
