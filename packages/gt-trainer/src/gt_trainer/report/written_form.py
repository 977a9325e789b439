"""The form of what a run writes into its dump folder, as far as a report reads it.

A form is a kind of value, a list with the form of its items, or a dictionary of forms by key. A key
that ends with ``?`` may be missing; the key ``*`` is for every key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

_COUNT, _NUMBER, _TEXT, _TIME = "a whole number", "a number", "a text", "a time"
_MAX_COUNT = 10**18
_MAX_TIME = 10**11
"""Seconds since 1970 of the year 5138; ``time.gmtime`` knows some more."""

_COUNTS = {"*": _COUNT}
_BY_LAYER = {"*": _COUNTS}

STEP: Mapping[str, Any] = {
    "step": _COUNT,
    "loss": _NUMBER,
    "grad_norm?": _NUMBER,
    "tokens_per_second?": _NUMBER,
    "memory_gib?": _NUMBER,
}
"""A line of ``metrics.jsonl``."""

VALIDATION: Mapping[str, Any] = {"step": _COUNT, "validation_loss": _NUMBER}
START: Mapping[str, Any] = {"step": _COUNT, "time": _TIME, "compile?": {}}
STARTUP: Mapping[str, Any] = {"*": _NUMBER}
_PASS = {
    "pass": _TEXT,
    "operators": (_COUNT, _COUNT),
    "collective_bytes": (_COUNT, _COUNT),
    "done": {"*": _NUMBER},
    "refused": [_TEXT],
    "operator_differences?": _COUNTS,
}
CAPTURE: Mapping[str, Any] = {
    "captured": _TEXT,
    "graphs": [[_PASS]],
    "memory": (_TEXT, None),
    "layers?": [_BY_LAYER],
    "by_layer?": [{"before": (_BY_LAYER, None), "after": (_BY_LAYER, None)}],
}
"""An item of ``captures.json``."""


def problems_of(found: Any, form: Any, where: str = "it") -> Iterator[str]:
    """Yield, in words, where a value has another form."""
    if isinstance(form, str):
        if not _is(found, form):
            yield f"{where} is {_shown(found)}, not {form}"
    elif isinstance(form, tuple) and form[1] is None:
        if found is not None:
            yield from problems_of(found, form[0], where)
    elif isinstance(form, tuple):
        if not isinstance(found, list) or len(found) != len(form):
            yield f"{where} is {_shown(found)}, not a list of {len(form)}"
            return
        for place, (each, of_it) in enumerate(zip(found, form, strict=True)):
            yield from problems_of(each, of_it, f"{where}[{place}]")
    elif isinstance(form, list):
        if not isinstance(found, list):
            yield f"{where} is {_shown(found)}, not a list"
            return
        for place, each in enumerate(found):
            yield from problems_of(each, form[0], f"{where}[{place}]")
    elif not isinstance(found, dict):
        yield f"{where} is {_shown(found)}, not an object"
    else:
        for key, of_it in form.items():
            if key == "*":
                for name, each in found.items():
                    yield from problems_of(each, of_it, f"{where}[{name[:40]!r}]")
            elif (name := key.removesuffix("?")) in found:
                yield from problems_of(found[name], of_it, f"{where}[{name!r}]")
            elif name == key:
                yield f"{where} has no {name!r}"


def _is(found: Any, kind: str) -> bool:
    if kind == _TEXT:
        return isinstance(found, str)
    if isinstance(found, bool) or not isinstance(found, int | float):
        return False
    if kind == _TIME:
        return 0 <= found <= _MAX_TIME
    if kind == _COUNT:
        return isinstance(found, int) and abs(found) <= _MAX_COUNT
    return (isinstance(found, float) and not math.isfinite(found)) or abs(found) <= 1e300


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
