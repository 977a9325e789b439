"""The identity of a captured graph: a digest over everything that went into it.

A stored graph may be used only by a run with the same fingerprint. Stale means refuse, and no
switch skips the check. To leave a field out by mistake is the costly error (a stale graph runs and
nobody notices), so fields are found by reflection and count unless their own declaration says
otherwise; the only price of counting too much is a needless capture.

The flat field map is kept beside the digest, so that a refusal can say which field differs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from types import MappingProxyType

from gt_config.compile_config import CompileConfig
from gt_config.errors import (
    FieldDifference,
    FingerprintDocumentError,
    FingerprintTypeError,
    StaleFingerprintError,
)
from gt_config.graph_neutral import is_graph_neutral
from gt_config.topology import Topology

FINGERPRINT_FORMAT = 1
"""Raised by one whenever the canonical text of anything changes; it is part of every digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """A digest and the fields behind it. Two fingerprints are equal if their fields are."""

    fields: Mapping[str, str]
    """Canonical text of every field by path; read-only and sorted."""

    digest: str = field(init=False)
    """SHA-256 over the canonical JSON of the format number and the fields; 64 hex digits."""

    def __post_init__(self) -> None:
        ordered = MappingProxyType(dict(sorted(self.fields.items())))
        object.__setattr__(self, "fields", ordered)
        text = _canonical_json({"format": FINGERPRINT_FORMAT, "fields": dict(ordered)})
        object.__setattr__(self, "digest", hashlib.sha256(text.encode()).hexdigest())

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> tuple[object, ...]:
        # A read-only mapping does not pickle, and a checked document is the better wire format.
        return (Fingerprint.from_json, (self.to_json(),))

    @classmethod
    def of(cls, parts: Mapping[str, object]) -> Fingerprint:
        """The fingerprint of plain data, by the names with which the paths of its fields begin.

        Raises:
            FingerprintTypeError: names the path of a value that has no canonical form.
        """
        entries: dict[str, str] = {}
        for name, part in parts.items():
            entries |= flatten(part, path=name)
        return cls(fields=entries)

    def to_json(self) -> str:
        """The fingerprint as a JSON document that ``from_json`` reads."""
        document = {
            "format": FINGERPRINT_FORMAT,
            "digest": self.digest,
            "fields": dict(self.fields),
        }
        return json.dumps(document, indent=1, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Fingerprint:
        """The fingerprint in a document that ``to_json`` wrote.

        Raises:
            FingerprintDocumentError: the text is not such a document, is of another format, or
                holds a digest that does not match its fields.
        """
        try:
            document = json.loads(text)
        except ValueError as error:
            raise FingerprintDocumentError(
                f"a fingerprint is JSON, and this is not: {error}"
            ) from (error)
        if not isinstance(document, dict) or set(document) != {"format", "digest", "fields"}:
            raise FingerprintDocumentError(
                "a fingerprint document has exactly the keys 'format', 'digest' and 'fields'"
            )
        if document["format"] != FINGERPRINT_FORMAT:
            raise FingerprintDocumentError(
                f"the fingerprint has format {document['format']!r}, and this gt-config reads "
                f"format {FINGERPRINT_FORMAT}: capture again"
            )
        entries = document["fields"]
        if not isinstance(entries, dict) or not all(isinstance(v, str) for v in entries.values()):
            raise FingerprintDocumentError("the fields of a fingerprint map paths to texts")
        loaded = cls(fields=entries)
        if document["digest"] != loaded.digest:
            raise FingerprintDocumentError(
                f"the fingerprint claims the digest {document['digest']!r}, but its fields give "
                f"{loaded.digest!r}: the document was damaged or edited"
            )
        return loaded


def fingerprint(
    config: CompileConfig,
    topology: Topology,
    model: object,
    batch: object,
    environment: Mapping[str, str | None],
    further: Mapping[str, object] = MappingProxyType({}),
) -> Fingerprint:
    """The fingerprint of one capture.

    Args:
        config: the flags under ``--compile.``.
        topology: mesh degrees and batch extents.
        model: plain data that identifies the model: its own configuration, and names, shapes and
            dtypes of its parameters and buffers.
        batch: plain data that identifies the inputs: names, shapes and dtypes.
        environment: version of each thing that shapes a graph: the gt packages, torch, CUDA,
            torchtitan. None stands for one that is absent.
        further: plain data of whatever else shapes the graph, by the name with which its paths
            begin: the recipe of passes, or the loss.

    Raises:
        FingerprintTypeError: names the path of a value that has no canonical form.
        ValueError: ``environment`` is empty, as no graph is independent of every version; or
            ``further`` has a name that another argument has.
    """
    if not environment:
        raise ValueError("environment is empty: give the versions of the gt packages and of torch")
    parts: dict[str, object] = {
        "config": config,
        "topology": topology,
        "model": model,
        "batch": batch,
        "environment": environment,
    }
    if taken := sorted(parts.keys() & further.keys()):
        raise ValueError(f"further names {', '.join(taken)}, which are arguments of their own")
    return Fingerprint.of({**parts, **further})


def explain_difference(before: Fingerprint, after: Fingerprint) -> tuple[FieldDifference, ...]:
    """Every field that differs, was added or was removed, sorted by path; empty if none."""
    return tuple(
        FieldDifference(path=path, before=before.fields.get(path), after=after.fields.get(path))
        for path in sorted({*before.fields, *after.fields})
        if before.fields.get(path) != after.fields.get(path)
    )


def refuse_stale(*, stored: Fingerprint, current: Fingerprint) -> None:
    """Refuse what was stored under another fingerprint than this run's.

    Raises:
        StaleFingerprintError: names every field that differs, with both values.
    """
    differences = explain_difference(stored, current)
    if differences:
        raise StaleFingerprintError(differences)


def _canonical_json(document: object) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


# Flattens plain data to canonical text, one entry a field, found by reflection.
#
# Two values flatten alike exactly if they mean the same: the class of every dataclass and enum
# is part of the text; ``1``, ``1.0``, ``True`` and ``"1"`` differ, as values and as mapping
# keys; floats are written exactly, so that ``0.0`` and ``-0.0`` differ and NaN equals itself.
# Insertion order of mappings means nothing, and lists and tuples are both sequences. Whatever
# has no such text (sets, arrays, functions, subclasses of the plain types) is refused by path
# instead of guessed.
_text_of = json.JSONEncoder(ensure_ascii=False).encode  # made once: json.dumps makes one a call
_ALLOWED = "dataclasses, mappings, lists, tuples, enums, str, int, float, bool and None"


def flatten(value: object, *, path: str) -> dict[str, str]:
    """Canonical text of every field in ``value``, keyed by its path.

    Containers have an entry too, with their class or their length, so that an empty one shows.
    Fields of dataclasses that are marked ``graph_neutral`` are left out.

    Args:
        value: the data.
        path: the name of the root, with which every path begins.

    Raises:
        FingerprintTypeError: names the path of a value that has no canonical text.
    """
    entries: dict[str, str] = {}
    _flatten(value, path=path, entries=entries, above=())
    return entries


def _flatten(value: object, *, path: str, entries: dict[str, str], above: tuple[int, ...]) -> None:
    if id(value) in above:
        raise FingerprintTypeError(f"{path} contains itself, so it has no canonical form")
    inside = (*above, id(value))
    if is_dataclass(value) and not isinstance(value, type):
        entries[path] = _class_name(value)
        for field in fields(value):
            if not is_graph_neutral(field):
                inner = getattr(value, field.name)
                _flatten(inner, path=f"{path}.{field.name}", entries=entries, above=inside)
    elif isinstance(value, Mapping):
        entries[path] = f"mapping of {len(value)}"
        for key, inner in value.items():
            key_path = f"{path}[{_scalar(key, path=f'a key of {path}')}]"
            _flatten(inner, path=key_path, entries=entries, above=inside)
    elif isinstance(value, list | tuple) and type(value) in (list, tuple):
        entries[path] = f"sequence of {len(value)}"
        for index, inner in enumerate(value):
            _flatten(inner, path=f"{path}[{index}]", entries=entries, above=inside)
    else:
        entries[path] = _scalar(value, path=path)


def _scalar(value: object, *, path: str) -> str:
    if isinstance(value, Enum):
        return f"{_class_name(value)}.{value.name}"
    if value is None or type(value) is bool or type(value) is int:
        return _text_of(value)
    if type(value) is float:
        return repr(value)
    if type(value) is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise FingerprintTypeError(f"{path} is {value!r}, which is no valid Unicode") from None
        return _text_of(value)
    raise FingerprintTypeError(
        f"{path} is of type {_class_name(value)}, which has no canonical form; "
        f"give plain data: {_ALLOWED}"
    )


def _class_name(value: object) -> str:
    cls = type(value)
    return f"{cls.__module__}.{cls.__qualname__}"
