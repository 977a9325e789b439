"""The "Did you mean ...?" of every message about a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

_MOST = 3
_CUTOFF = 0.6
_CLEARLY_FARTHER = 0.1

_ELSEWHERE: Mapping[str, str] = {
    "batch_size": "local_batch_size",
    "cp": "context_parallel_degree",
    "dp": "data_parallel_shard_degree",
    "ep": "expert_parallel_degree",
    "fsdp": "data_parallel_shard_degree",
    "learning_rate": "lr",
    "pp": "pipeline_parallel_degree",
    "tp": "tensor_parallel_degree",
}
"""What other trainers call a flag, and what the last part of its name is here."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " Did you mean ...?" with the nearest names, up to three, or nothing.

    A flag of the same name in another group is nearest, also by what others call it. Flags of a
    group have much in common, so what is clearly farther than the nearest is left out. A word
    without a group is compared with names without theirs too.
    """
    known = list(known)
    own_name = _own_name(word)
    own_name = _ELSEWHERE.get(own_name, own_name)
    nearest = [name for name in known if "." in name and _own_name(name) == own_name]
    if not 0 < len(nearest) <= _MOST:
        nearest = _near(word, known)
    return f" Did you mean {' or '.join(map(repr, nearest))}?" if nearest else ""


def _near(word: str, known: list[str]) -> list[str]:
    likeness = {name: _likeness(word, name) for name in dict.fromkeys(known)}
    limit = max([_CUTOFF, max(likeness.values(), default=0.0) - _CLEARLY_FARTHER])
    near = [name for name in likeness if likeness[name] >= limit]
    return sorted(near, key=lambda name: -likeness[name])[:_MOST]


def _likeness(word: str, name: str) -> float:
    whole = difflib.SequenceMatcher(None, name, word).ratio()
    if "." in word or "." not in name:
        return whole
    own = difflib.SequenceMatcher(None, _own_name(name), word.removeprefix("--")).ratio()
    return max(whole, own)


def _own_name(flag: str) -> str:
    return flag.rpartition(".")[2].removeprefix("--").replace("-", "_")
