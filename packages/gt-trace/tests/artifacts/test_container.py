"""Containers: what is written is read, whose it is comes first, and what is damaged is refused."""

from __future__ import annotations

import json
import math
import os
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from container_cases import (
    BLOBS,
    DOCUMENTS,
    FINGERPRINT,
    KIND,
    OTHER,
    container_bytes,
    forged,
    section,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from gt_config import Fingerprint
from gt_config.errors import StaleFingerprintError
from gt_trace.artifacts.container import MAX_SECTION_BYTES, open_container, write_container
from gt_trace.artifacts.strict_json import json_bytes, parse_json
from gt_trace.errors import ArtifactDamagedError, ArtifactError, ArtifactVersionError


def contents(path: Path, fingerprint: Fingerprint | None = FINGERPRINT) -> dict[str, Any]:
    """Everything that a file holds."""
    with open_container(path, kind=KIND, fingerprint=fingerprint) as container:
        return {
            name: container.document(name) if row.media == "json" else container.blob(name)
            for name, row in container.sections.items()
        }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "step.gta"


def refusal(path: Path, raw: bytes, fingerprint: Fingerprint | None = FINGERPRINT) -> str:
    """How a file that is damaged somewhere is refused, without its path."""
    path.write_bytes(raw)
    with pytest.raises(ArtifactDamagedError) as caught:
        contents(path, fingerprint)
    text = str(caught.value)
    assert text.startswith(f"{path} is damaged: ")
    assert text.endswith("; capture again")
    return text.removeprefix(f"{path} is damaged: ").removesuffix("; capture again")


# ---- what is written is read --------------------------------------------------------------------


def test_what_is_written_is_read(path: Path) -> None:
    write_container(path, kind=KIND, fingerprint=FINGERPRINT, documents=DOCUMENTS, blobs=BLOBS)
    assert contents(path) == DOCUMENTS | BLOBS
    assert path.read_bytes() == container_bytes()
    assert os.listdir(path.parent) == [path.name]
    with open_container(path, kind=KIND, fingerprint=FINGERPRINT) as container:
        assert container.fingerprint == FINGERPRINT
        assert container.kind == KIND
        assert list(container.sections) == ["graph", "layouts", "constants/0", "constants/1"]
        container.verify()


texts = st.text(st.characters(codec="utf-8"))


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
        lambda inner: st.lists(inner) | st.dictionaries(texts, inner),
    )
)
def test_every_document_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, document: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.gta"
    path.write_bytes(container_bytes({"graph": document}, {}))
    read = contents(path)["graph"]
    assert repr(read) == repr(document)  # and so -0.0 is not 0.0, nor True 1


def test_numbers_that_json_has_not_are_read_as_they_were(path: Path) -> None:
    path.write_bytes(container_bytes({"graph": [math.inf, -math.inf, math.nan]}, {}))
    above, below, neither = contents(path)["graph"]
    assert (above, below) == (math.inf, -math.inf)
    assert math.isnan(neither)


def test_a_file_is_text_where_its_content_is(path: Path) -> None:
    lines = container_bytes(blobs={}).decode("utf-8").splitlines()
    assert lines[0].startswith("gt-artifact 7 ")
    assert '   "environment.torch": "\\"2.15.0\\""' in lines
    assert lines[-2:] == [
        '{"nodes":[["add",[1,2.5,null,true]],["größe",Infinity]],"empty":{}}',
        "[]",
    ]


def test_a_file_that_is_replaced_while_it_is_open_is_read_to_its_end(path: Path) -> None:
    path.write_bytes(container_bytes())
    with open_container(path, kind=KIND, fingerprint=FINGERPRINT) as container:
        write_container(path, kind=KIND, fingerprint=OTHER, documents={}, blobs={})
        assert container.document("graph") == DOCUMENTS["graph"]


def test_equal_content_gives_equal_bytes() -> None:
    assert container_bytes() == container_bytes()
    assert container_bytes({"graph": [1]}, {}) == container_bytes({"graph": (1,)}, {})


def test_refuses_to_write_a_document_and_a_blob_of_one_name() -> None:
    with pytest.raises(ValueError, match="these names are of a document and of a blob: graph"):
        container_bytes({"graph": []}, {"graph": b""})


def test_brackets_and_quotes_in_texts_are_no_nesting() -> None:
    texts = ["", "[", "]" * 200, '"', '"["', "\\", '\\"{', "{}", "a\nb"]
    draw = random.Random(0)
    for _ in range(200):
        chosen = draw.choices(texts, k=6)
        document: Any = [dict(zip(texts, chosen, strict=False)), *chosen]
        for _ in range(98):
            document = [document, draw.choice(texts)]
        assert parse_json(json_bytes(document)) == document
        with pytest.raises(ValueError, match="nest deeper than 100 levels"):
            json_bytes([document])


def test_refuses_to_write_what_it_would_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(ValueError, match="lists and objects nest deeper than 100 levels"):
        container_bytes({"graph": deep}, {})
    container_bytes({"graph": deep[0]}, {})
    monkeypatch.setattr(
        "gt_trace.artifacts.container.MAX_SECTION_BYTES", {"json": 2**28, "bytes": 3}
    )
    with pytest.raises(
        ArtifactError, match="section 'a' has 4 bytes, and one of media 'bytes' may have 3"
    ):
        container_bytes({}, {"a": b"1234"})
    monkeypatch.setattr("gt_trace.artifacts.container.MAX_HEADER_BYTES", 9)
    with pytest.raises(ArtifactError, match=r"the header has \d+ bytes, and may have 9"):
        container_bytes({}, {})


# ---- whose it is comes first --------------------------------------------------------------------


def test_stale_is_found_before_any_section_is_read(path: Path) -> None:
    raw = container_bytes()
    garbage = raw[: -len(b"".join(BLOBS.values())) - 20] + os.urandom(276)
    path.write_bytes(garbage)
    assert len(garbage) == len(raw)
    with pytest.raises(StaleFingerprintError) as caught:
        open_container(path, kind=KIND, fingerprint=OTHER)
    assert str(caught.value) == (
        "stale: 1 field differs between what is stored and this run:\n"
        '  environment.torch: "2.15.0" became "2.14.1"'
    )
    with (
        open_container(path, kind=KIND, fingerprint=FINGERPRINT) as container,
        pytest.raises(ArtifactDamagedError),
    ):
        container.verify()


def test_checks_come_in_their_order(path: Path) -> None:
    """Format, header, kind, fingerprint: a file with several faults is refused for the first."""

    def kind_of_refusal(raw: bytes, kind: str = KIND) -> type[Exception]:
        path.write_bytes(raw)
        with pytest.raises((ArtifactError, StaleFingerprintError)) as caught:
            open_container(path, kind=kind, fingerprint=OTHER)
        return caught.type

    faulty = forged([{}], b"")
    assert kind_of_refusal(b"PK" + faulty) is ArtifactDamagedError
    assert kind_of_refusal(faulty.replace(b"artifact 7", b"artifact 1")) is ArtifactVersionError
    assert kind_of_refusal(faulty, "stage") is ArtifactDamagedError
    assert kind_of_refusal(forged([], b""), "stage") is ArtifactError
    assert kind_of_refusal(forged([], b"")) is StaleFingerprintError


def test_refuses_another_format_whatever_comes_after_it(path: Path) -> None:
    path.write_bytes(b"gt-artifact 12 something new\n")
    with pytest.raises(ArtifactVersionError) as caught:
        open_container(path, kind=KIND, fingerprint=FINGERPRINT)
    assert str(caught.value) == (
        f"{path} is an artifact of format 12, and this gt-trace reads format 7: capture again"
    )


def test_refuses_a_fingerprint_of_another_format(path: Path) -> None:
    document = json.loads(FINGERPRINT.to_json())
    path.write_bytes(forged([], b"", fingerprint=document | {"format": 2}))
    with pytest.raises(ArtifactVersionError, match=r"has format 2, and this gt-config reads"):
        open_container(path, kind=KIND, fingerprint=FINGERPRINT)


def test_refuses_another_kind(path: Path) -> None:
    path.write_bytes(container_bytes())
    with pytest.raises(ArtifactError) as caught:
        open_container(path, kind="stage", fingerprint=FINGERPRINT)
    assert str(caught.value) == f"{path} holds a 'step', and a 'stage' is asked for"


def test_tools_may_look_at_what_is_stale(path: Path) -> None:
    path.write_bytes(container_bytes())
    assert contents(path, fingerprint=None) == DOCUMENTS | BLOBS


# ---- what cannot be read ------------------------------------------------------------------------


def test_refuses_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reasons = {
        "missing": "cannot be read: No such file or directory",
        "pipe": "cannot be read: it is no regular file",
        "": "cannot be read: it is no regular file",
    }
    for name, reason in reasons.items():
        with pytest.raises(ArtifactError) as caught:
            open_container(tmp_path / name, kind=KIND, fingerprint=FINGERPRINT)
        assert str(caught.value) == f"{tmp_path / name} {reason}"
        assert caught.type is ArtifactError


# ---- what is damaged is refused -----------------------------------------------------------------


def test_every_truncation_is_refused(path: Path) -> None:
    raw = container_bytes()
    for length in range(len(raw)):
        refusal(path, raw[:length])
    refusal(path, raw + b"\n")


def test_flipped_bits_are_refused(path: Path) -> None:
    raw = container_bytes()
    generator = random.Random(19)
    for _ in range(2000):
        damaged = bytearray(raw)
        for _ in range(generator.choice((1, 1, 1, 2, 8))):
            damaged[generator.randrange(len(raw))] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        if damaged != raw:
            with pytest.raises(ArtifactError):
                contents(path)


def test_headers_that_are_nonsense_are_refused_as_such(path: Path) -> None:
    """Headers whose digest is right and whose text is not: nothing but our errors comes of them.

    What is read nevertheless is what was written; it may be named otherwise.
    """
    raw = container_bytes()
    line, rest = raw.split(b"\n", 1)
    header_bytes = int(line.split()[2])
    generator = random.Random(37)
    snippets = [b'"', b"{", b"}", b"[", b"]", b",", b":", b"-", b"1", b"1e999", b"9" * 5000]
    snippets += [b"null", b"true", b'"\\ud800"', b"\\", b"\xff", b"", b'"name"', b"NaN", b"\0"]
    for _ in range(2000):
        header = bytearray(rest[:header_bytes])
        for _ in range(generator.choice((1, 1, 2, 5))):
            at = generator.randrange(len(header))
            header[at : at + generator.choice((0, 1, 1, 4, 20))] = generator.choice(snippets)
        damaged = forged([], rest[header_bytes:], header=bytes(header))
        path.write_bytes(damaged)
        try:
            read = contents(path)
        except (ArtifactError, StaleFingerprintError):
            continue
        assert [*read.values()] == [*DOCUMENTS.values(), *BLOBS.values()]


def test_a_section_that_is_another_is_refused_when_it_is_read(path: Path) -> None:
    raw = container_bytes({"a": [1], "b": [2], "c": [3]}, {})
    swapped = raw.replace(b"[1]\n[2]\n", b"[2]\n[1]\n")
    assert refusal(path, swapped) == "the SHA-256 of its section 'a' is another"
    with open_container(path, kind=KIND, fingerprint=FINGERPRINT) as container:
        assert container.document("c") == [3]


def test_a_file_that_is_cut_while_it_is_open_is_refused(path: Path) -> None:
    path.write_bytes(container_bytes({}, {"constants/0": bytes(2**20)}))
    with open_container(path, kind=KIND, fingerprint=FINGERPRINT) as container:
        os.truncate(path, 2**19)
        with pytest.raises(ArtifactDamagedError, match="SHA-256 of its section 'constants/0'"):
            container.blob("constants/0")


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"", "it does not begin with 'gt-artifact ', as artifacts do"),
        (b"gt-artifact 7 0 00\n", "its first line is not whole"),
        (b"gt-artifact 01 5 " + b"0" * 64 + b"\n" + b" " * 5, "its first line is not whole"),
        (b"gt-artifact 7 -5 " + b"0" * 64 + b"\n" + b" " * 5, "its first line is not whole"),
        (
            b"gt-artifact 7 999999999 " + b"0" * 64 + b"\n{}",
            (
                "its header would have 999,999,999 bytes, of 2 that there are and 67,108,864 that it "
                "may have"
            ),
        ),
        (b"gt-artifact 7 2 " + b"0" * 64 + b"\n{}", "the SHA-256 of its header is another"),
        (
            forged([], b"", header=b'{"kind":"a","kind":"b"}'),
            "its header is no strict JSON: an object has the key 'kind' twice",
        ),
        (
            forged([], b"", header=b"[" * 1_000_000 + b"]" * 1_000_000),
            (
                "its header is no strict JSON: lists and objects nest deeper than 100 levels, or "
                "brackets do not match"
            ),
        ),
        (
            forged([], b"", header=b"[1]"),
            "a header has exactly the keys 'kind', 'fingerprint' and 'sections'",
        ),
        (
            forged([], b"", code="import os"),
            "a header has exactly the keys 'kind', 'fingerprint' and 'sections'",
        ),
        (forged([], b"", kind=["step"]), "its kind is ['step'], which is no text"),
        (
            forged([], b"", fingerprint=[]),
            "a fingerprint document has exactly the keys 'format', 'digest' and 'fields'",
        ),
        (
            forged([], b"", fingerprint={"format": 1, "digest": "0", "fields": {}}),
            (
                "the fingerprint claims the digest '0', but its fields give "
                f"{Fingerprint(fields={}).digest!r}: the document was damaged or edited"
            ),
        ),
        (forged({}, b""), "its table of sections is no list"),
        (
            forged([{"name": "a"}], b""),
            "section 0 has not exactly the keys 'bytes', 'media', 'name', 'sha256'",
        ),
        (
            forged([section("a", b"[]"), section("a", b"{}")], b"[]{}"),
            "section 1 is named 'a': no text, or not the first",
        ),
        (
            forged([section("a", b"[]", media="pickle")], b"[]"),
            "section 'a' is of media 'pickle', not 'json' or 'bytes'",
        ),
        (
            forged([section("a", b"[]", media=["json"])], b"[]"),
            "section 'a' is of media ['json'], not 'json' or 'bytes'",
        ),
        (
            forged([section("a", b"", bytes=2**62)], b""),
            f"section 'a' has {2**62} bytes, not 0 to 268435456",
        ),
        (
            forged([section("a", b"[]"), section("b", b"", bytes=-1)], b"[]"),
            "section 'b' has -1 bytes, not 0 to 268435456",
        ),
        (
            forged([section("a", b"1", bytes=True)], b"1"),
            "section 'a' has True bytes, not 0 to 268435456",
        ),
        (
            forged([section("a", b"[]", sha256="0")], b"[]"),
            "section 'a' has the SHA-256 '0'",
        ),
        (
            forged([section("a", b"[]")], b"[]  "),
            "its sections end at byte 427, and the file has 429 bytes",
        ),
        (
            forged([section("a", b"{1}")], b"{1}"),
            (
                "its section 'a' is no strict JSON: Expecting property name enclosed in double quotes: "
                "line 1 column 2 (char 1)"
            ),
        ),
        (
            forged([section("a", b'"\xff"')], b'"\xff"'),
            (
                "its section 'a' is no strict JSON: 'utf-8' codec can't decode byte 0xff in position "
                "1: invalid start byte"
            ),
        ),
    ],
    ids=lambda value: value[-60:] if isinstance(value, str) else "",
)
def test_what_the_writer_would_not_write_is_refused(path: Path, raw: bytes, problem: str) -> None:
    assert refusal(path, raw) == problem


def test_what_a_reader_asks_for_must_be_there(path: Path) -> None:
    path.write_bytes(container_bytes({"graph": []}, {"x": b""}))
    with open_container(path, kind=KIND, fingerprint=FINGERPRINT) as container:
        for ask in (lambda: container.blob("graph"), lambda: container.document("nodes")):
            with pytest.raises(ArtifactDamagedError) as caught:
                ask()
            assert str(caught.value).endswith("but 'graph' (json), 'x' (bytes); capture again")


def test_a_refusal_is_short_whatever_the_file_says(path: Path) -> None:
    raw = forged([section("a" * 100_000, b"[]", sha256="0")], b"[]")
    assert len(refusal(path, raw)) < 600


def test_a_first_line_without_end_is_not_read(path: Path) -> None:
    path.write_bytes(b"gt-artifact 7 ")
    os.truncate(path, 2**30)
    tracemalloc.start()
    with pytest.raises(ArtifactDamagedError, match="its first line is not whole"):
        open_container(path, kind=KIND, fingerprint=FINGERPRINT)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


def test_a_file_as_large_as_it_claims_is_not_read_beyond_the_limits(path: Path) -> None:
    """A file may have holes: a claim of 1 TiB that is true costs its author nothing."""
    size = 2**40
    path.write_bytes(forged([section("a", b"", bytes=size, media="bytes")], b""))
    os.truncate(path, path.stat().st_size + size)
    with pytest.raises(ArtifactDamagedError, match=f"{size} bytes, not 0 to {2**32}"):
        open_container(path, kind=KIND, fingerprint=FINGERPRINT)
    assert MAX_SECTION_BYTES["bytes"] == 2**32
