"""A plan's file: one JSON document, which is refused unless every bit of its content agrees.

::

    {"format": "gt-autoparallel plan", "version": 8, "sha256": "...", "content": {...}}

The digest covers the canonical spelling of the content, so that white space may change and nothing
else.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gt_autoparallel.errors import PlanMismatchError
from gt_autoparallel.graph.graph_encoding import canonical_json
from gt_trace.artifacts.regular_file import read_regular
from gt_trace.artifacts.strict_json import parse_json

FORMAT = "gt-autoparallel plan"
FORMAT_VERSION = 8
"""1 did not know the classes and modes of modules; 2 what of a redistribution hides, nor strides of
meshes; 3 what is recomputed; 4 microbatches, nor gradients of inputs; 5 what the loss takes,
gradients of microbatches before, nor rivals; 6 what is in flight, nor what is gathered ahead; 7
what is gone and to come in a layer's turn."""


def write_document(content: Mapping[str, Any], target: Path) -> Path:
    """Write plain data; whoever reads ``target`` sees the old file or all of the new one.

    Args:
        content: of JSON values.
        target: where; its folder is made if missing.

    Returns:
        ``target``.

    Raises:
        OSError: the file cannot be written.
    """
    document = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "sha256": _digest(content),
        "content": content,
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with scratch.open("wb") as file:
            file.write(json.dumps(document, indent=1, sort_keys=True).encode("utf-8") + b"\n")
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)
    return target


def read_document(path: Path) -> dict[str, Any]:
    """What a file holds, its digest checked before anything else of it is believed.

    Raises:
        PlanMismatchError: the file is no plan, of another version, damaged or edited.
        OSError: it cannot be read.
    """
    try:
        document = parse_json(read_regular(path))
    except ValueError as error:
        raise PlanMismatchError(f"{path} is damaged or no plan: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise PlanMismatchError(f"{path} is no plan: its format is not {FORMAT!r}")
    version = document.get("version")
    if version != FORMAT_VERSION:
        age = "an older" if type(version) is int and version < FORMAT_VERSION else "another"
        raise PlanMismatchError(
            f"{path} was written by {age} version of gt-autoparallel: its format version is "
            f"{version!r}, and {FORMAT_VERSION} is read here; plan again"
        )
    unknown = sorted(document.keys() - {"format", "version", "sha256", "content"})
    if unknown:
        raise PlanMismatchError(f"{path} has fields that no plan has: {', '.join(unknown)}")
    if document.get("sha256") != _digest(document.get("content")):
        raise PlanMismatchError(
            f"{path} was damaged or edited: its content does not have the digest it names; "
            "to change a plan, plan again with constraints"
        )
    return document


def _digest(content: object) -> str:
    return hashlib.sha256(canonical_json(content)).hexdigest()
