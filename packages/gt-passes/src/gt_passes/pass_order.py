"""The order of passes: as given, but for what their declared facts ask."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gt_passes.contract import GraphPass
from gt_passes.errors import PassOrderError
from gt_passes.facts import Fact


def order_passes(
    passes: Sequence[GraphPass], *, given_facts: Iterable[Fact] = ()
) -> tuple[GraphPass, ...]:
    """Order passes so that each finds what it requires.

    Again and again the first pass in the given order whose requirements are established comes next:
    a stable topological order. A valid order is returned as it is.

    Args:
        passes: in the order wanted; the same pass may occur twice.
        given_facts: what holds before any pass.

    Raises:
        PassOrderError: a requirement that nothing establishes, or passes that wait for each other.
    """
    established = set(given_facts)
    waiting = list(passes)
    ordered: list[GraphPass] = []
    while waiting:
        ready = next((p for p in waiting if p.requires <= established), None)
        if ready is None:
            raise PassOrderError(_problems(waiting, established))
        # By identity: two passes with equal options are equal.
        del waiting[next(i for i, candidate in enumerate(waiting) if candidate is ready)]
        ordered.append(ready)
        established |= ready.provides
    return tuple(ordered)


def _problems(waiting: Sequence[GraphPass], established: set[Fact]) -> list[str]:
    """Why no waiting pass can be next: what is never provided, else who waits for whom."""
    provided = established.union(*(candidate.provides for candidate in waiting))
    missing = [
        f"{candidate.name} requires {fact}, and no pass provides it"
        for candidate in waiting
        for fact in _sorted(candidate.requires - provided)
    ]
    if missing:
        return missing
    return [
        f"{candidate.name} requires {fact}, which only {_providers(fact, waiting)} provides, "
        "and that waits too"
        for candidate in _cycle(waiting, established)
        for fact in _sorted(candidate.requires - established)
    ]


def _cycle(waiting: Sequence[GraphPass], established: set[Fact]) -> list[GraphPass]:
    """The waiting passes that others wait for: those on a cycle, without their mere followers."""
    on_cycle = list(waiting)
    while True:
        needed = {fact for candidate in on_cycle for fact in candidate.requires - established}
        kept = [candidate for candidate in on_cycle if candidate.provides & needed]
        if len(kept) == len(on_cycle):
            return kept
        on_cycle = kept


def _providers(fact: Fact, waiting: Sequence[GraphPass]) -> str:
    return " or ".join(candidate.name for candidate in waiting if fact in candidate.provides)


def _sorted(facts: Iterable[Fact]) -> list[Fact]:
    return sorted(facts, key=lambda fact: fact.name)
