"""JSON from a file that nobody vouches for: no deep nesting, and no key twice in one object.

Not a number and infinities are written as Python writes them, as graphs hold them; everything else
is standard JSON. Imports no torch.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

MAX_NESTING = 100
"""How deeply lists and objects may stand in one another, so that readers may recurse."""

MAX_VALUES = 2**25
"""How many values a text may hold at most; each takes some 80 bytes when it is parsed."""

_NO_STRUCTURE = bytes(sorted(set(range(256)) - set(b'[]{}"')))
_BRACES_AS_BRACKETS = bytes.maketrans(b"{}", b"[]")


def json_bytes(document: object, *, indent: int | None = None) -> bytes:
    """One line of UTF-8 text, or indented lines; keys keep their order.

    Args:
        document: dicts, lists, scalars; tuples become lists, and keys that are scalars texts.
        indent: spaces for each level; None for one line without spaces.

    Raises:
        TypeError: it holds something else.
        ValueError: it nests too deeply for ``parse_json``, or in itself, or holds a text that is no
            Unicode.
    """
    separators = (",", ":") if indent is None else None
    text = json.dumps(document, ensure_ascii=False, indent=indent, separators=separators)
    raw = text.encode("utf-8") + b"\n"
    _check_nesting(raw)
    return raw


def parse_json(raw: bytes) -> Any:
    """The document in a text of ``json_bytes``, or of anybody else.

    Raises:
        ValueError: it is not JSON, not UTF-8, nests deeper than ``MAX_NESTING``, has more than
            ``MAX_VALUES`` values, or has an object with a key twice.
    """
    if sum(map(raw.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise ValueError(f"it has more than {MAX_VALUES:,} values")
    _check_nesting(raw)
    return json.loads(raw.decode("utf-8"), object_pairs_hook=_object)


def _check_nesting(raw: bytes) -> None:
    """Take away the innermost pairs of brackets, all at once, until none is left."""
    text = re.sub(rb"\\.", b"", raw, flags=re.DOTALL) if b"\\" in raw else raw
    text = text.translate(None, delete=_NO_STRUCTURE)
    text = text.replace(b'""', b"")  # what is in a text, and what is not, stays so
    text = re.sub(rb'"[^"]*"?', b"", text)
    text = text.translate(_BRACES_AS_BRACKETS)
    for _ in range(MAX_NESTING):
        if not text:
            return
        text = text.replace(b"[]", b"")
    if text:
        raise ValueError(
            f"lists and objects nest deeper than {MAX_NESTING} levels, or brackets do not match"
        )


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    counts = Counter(key for key, _ in pairs)
    twice = next(key for key, count in counts.items() if count > 1)
    raise ValueError(f"an object has the key {twice!r} twice")
