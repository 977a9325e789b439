"""Containers to damage: how they are made, and files that the writer would not make.

Imports no torch: the writers that are killed run this too.
"""

from __future__ import annotations

import hashlib
import io
import json
from typing import Any

from gt_config import Fingerprint
from gt_trace.artifacts.container import CONTAINER_FORMAT, write_container

FINGERPRINT = Fingerprint(fields={"config.mode": '"aot_fx_trace"', "environment.torch": '"2.15.0"'})
OTHER = Fingerprint(fields={"config.mode": '"aot_fx_trace"', "environment.torch": '"2.14.1"'})
KIND = "step"
DOCUMENTS: dict[str, Any] = {
    "graph": {"nodes": [["add", [1, 2.5, None, True]], ["größe", float("inf")]], "empty": {}},
    "layouts": [],
}
BLOBS = {"constants/0": bytes(range(256)), "constants/1": b""}


def container_bytes(
    documents: dict[str, Any] = DOCUMENTS,
    blobs: dict[str, bytes] = BLOBS,
    *,
    kind: str = KIND,
    fingerprint: Fingerprint = FINGERPRINT,
) -> bytes:
    """A file as the writer makes it."""
    file = io.BytesIO()
    write_container(file, kind=kind, fingerprint=fingerprint, documents=documents, blobs=blobs)
    return file.getvalue()


def section(name: str, raw: bytes, *, media: str = "json", **other: Any) -> dict[str, Any]:
    """A row of the table of sections."""
    digest = hashlib.sha256(raw).hexdigest()
    return {"name": name, "media": media, "bytes": len(raw), "sha256": digest} | other


def forged(
    sections: Any,
    body: bytes,
    *,
    header: bytes | None = None,
    version: int = CONTAINER_FORMAT,
    fingerprint: Any = None,
    **other: Any,
) -> bytes:
    """A file that somebody made by hand, whose header is what its first line says."""
    if header is None:
        identity = json.loads(FINGERPRINT.to_json()) if fingerprint is None else fingerprint
        whole = {"kind": KIND, "fingerprint": identity, "sections": sections} | other
        header = json.dumps(whole).encode()
    digest = hashlib.sha256(header).hexdigest()
    return f"gt-artifact {version} {len(header)} {digest}\n".encode() + header + body
