"""The "Did you mean ...?" of every message about a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MOST = 3
_CUTOFF = 0.6
_CLEARLY_FARTHER = 0.1


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " Did you mean ...?" with the nearest names, up to three, or nothing.

    A flag of the same name in another group is nearest. Flags of a group have much in common, so
    what is clearly farther than the nearest is left out.
    """
    known = list(known)
    nearest = [name for name in known if "." in name and _own_name(name) == _own_name(word)]
    if not 0 < len(nearest) <= _MOST:
        nearest = _near(word, known)
    return f" Did you mean {' or '.join(map(repr, nearest))}?" if nearest else ""


def _near(word: str, known: list[str]) -> list[str]:
    matches = difflib.get_close_matches(word, known, n=_MOST, cutoff=_CUTOFF)
    ratios = {match: difflib.SequenceMatcher(None, word, match).ratio() for match in matches}
    limit = max(ratios.values(), default=0.0) - _CLEARLY_FARTHER
    return [match for match in matches if ratios[match] > limit]


def _own_name(flag: str) -> str:
    return flag.rpartition(".")[2].removeprefix("--")
