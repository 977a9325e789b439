"""The "Did you mean ...?" of every message about a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_CUTOFF = 0.6
_CLEARLY_FARTHER = 0.1


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " Did you mean ...?" with the nearest names, up to three, or nothing.

    Flags of a group have much in common, so what is clearly farther than the nearest is left out.
    """
    matches = difflib.get_close_matches(word, list(known), n=3, cutoff=_CUTOFF)
    if not matches:
        return ""
    ratios = {match: difflib.SequenceMatcher(None, word, match).ratio() for match in matches}
    limit = ratios[matches[0]] - _CLEARLY_FARTHER
    nearest = [match for match in matches if ratios[match] > limit]
    return f" Did you mean {' or '.join(map(repr, nearest))}?"
