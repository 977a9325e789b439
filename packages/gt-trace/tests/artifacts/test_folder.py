"""A shared folder: entries are complete or absent, limits are kept, and what is damaged is kept."""

from __future__ import annotations

import errno
import os
import resource
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest
from killed_writers import report_of_killed_writers

from gt_trace.artifacts.folder import MAX_DAMAGED, ArtifactFolder
from gt_trace.errors import ArtifactError

A, B, C = ("a" * 64, "b" * 64, "c" * 64)
LONG_AGO = 1_600_000_000.0


def writes(content: bytes) -> Callable[[BinaryIO], None]:
    def write(file: BinaryIO) -> None:
        file.write(content)

    return write


def files(path: Path) -> list[str]:
    """Every file below a folder."""
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir())


def set_age(path: Path, seconds: float) -> None:
    """Let a file have been used last so long after some day long ago."""
    os.utime(path, (LONG_AGO + seconds, LONG_AGO + seconds))


@pytest.fixture
def folder(tmp_path: Path) -> ArtifactFolder:
    return ArtifactFolder(tmp_path / "artifacts", max_bytes=None)


# ---- writing and finding ------------------------------------------------------------------------


def test_what_is_written_is_found(folder: ArtifactFolder) -> None:
    assert folder.find(A, "step.gta") is None
    path = folder.write(A, "step.gta", writes(b"one"))
    assert path == folder.path / A / "step.gta"
    assert folder.find(A, "step.gta") == path
    assert folder.find(B, "step.gta") is None
    folder.write(A, "step.gta", writes(b"two"))
    assert path.read_bytes() == b"two"
    assert files(folder.path) == [f"{A}/step.gta"]


def test_entries_say_what_there_is(folder: ArtifactFolder) -> None:
    assert folder.entries() == ()
    for digest, name, content in ((B, "x", b"123"), (A, "y", b""), (A, "x", b"1")):
        set_age(folder.write(digest, name, writes(content)), len(content))
    (folder.path / "README").write_text("not ours")
    (folder.path / A / ".writing-host-1-2").write_text("being written")
    entries = [(e.digest, e.name, e.num_bytes, e.last_used - LONG_AGO) for e in folder.entries()]
    assert entries == [(A, "x", 1, 1.0), (A, "y", 0, 0.0), (B, "x", 3, 3.0)]


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", ".writing-x", "-x", "a/b", "../x", "X", "a b", "a\n", "ä", "a" * 101],
)
def test_refuses_names_that_are_paths_or_look_alike(folder: ArtifactFolder, name: str) -> None:
    for ask in (lambda: folder.write(A, name, writes(b"")), lambda: folder.find(A, name)):
        with pytest.raises(ValueError, match="names no entry: allowed are up to 100 of a-z, 0-9"):
            ask()
    assert not folder.path.exists()


@pytest.mark.parametrize("digest", ["", "..", "damaged", "A" * 64, "a" * 63, "a" * 64 + "\n"])
def test_refuses_digests_that_are_none(folder: ArtifactFolder, digest: str) -> None:
    with pytest.raises(ValueError, match="is no digest: those have 64 hexadecimal digits"):
        folder.find(digest, "x")


def test_refuses_a_limit_that_nothing_fits(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_bytes is 0: allowed are positive numbers, and None"):
        ArtifactFolder(tmp_path, max_bytes=0)


# ---- writes that fail ---------------------------------------------------------------------------


def test_a_write_that_fails_leaves_what_was_there(folder: ArtifactFolder) -> None:
    path = folder.write(A, "x", writes(b"old"))

    def fail(file: BinaryIO) -> None:
        file.write(b"half")
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        folder.write(A, "x", fail)
    assert path.read_bytes() == b"old"
    assert files(folder.path) == [f"{A}/x"]


def test_a_file_that_the_system_lets_not_grow_is_refused(folder: ArtifactFolder) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(ArtifactError) as caught:
            folder.write(A, "x", writes(bytes(200_000)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(caught.value) == f"{folder.path / A / 'x'} cannot be written: File too large"
    assert files(folder.path) == []


def test_a_full_disk_that_shows_at_the_end_is_refused(
    folder: ArtifactFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ArtifactError, match=r"x cannot be written: No space left on device"):
        folder.write(A, "x", writes(b"1"))
    assert files(folder.path) == []


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = ArtifactFolder(tmp_path / "file", max_bytes=None)
    assert folder.find(A, "x") is None
    assert folder.entries() == ()
    with pytest.raises(ArtifactError, match=r"x cannot be written: Not a directory"):
        folder.write(A, "x", writes(b"1"))
    (tmp_path / A).touch()
    folder = ArtifactFolder(tmp_path, max_bytes=None)
    with pytest.raises(ArtifactError, match=r"x cannot be written: File exists"):
        folder.write(A, "x", writes(b"1"))


def test_a_folder_that_another_job_removes_is_made_again(
    folder: ArtifactFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever evicts the digest finds it empty: after it was made, or while it is looked for."""
    make, made = Path.mkdir, []

    def mkdir(path: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        make(path, mode, parents, exist_ok)
        if path.name == A:
            made.append(path)
            if len(made) <= 3:
                path.rmdir()
            if len(made) == 3:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    folder.path.mkdir()
    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert folder.write(A, "x", writes(b"1")).read_bytes() == b"1"
    assert len(made) == 4


# ---- folders to be read alone -------------------------------------------------------------------


@contextmanager
def read_only(path: Path) -> Iterator[None]:
    """Let nobody write below a folder; of the superuser, who may, become another user."""
    everything = [path, *path.rglob("*")]
    for file in everything:
        file.chmod(0o555 if file.is_dir() else 0o444)
    is_superuser = os.geteuid() == 0
    if is_superuser:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_superuser:
            os.seteuid(0)
        for file in everything:
            file.chmod(0o755 if file.is_dir() else 0o644)


def test_a_folder_to_be_read_alone_is_read() -> None:
    # Not tmp_path: nobody but its owner may look into what is above it.
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary)
        folder = ArtifactFolder(path, max_bytes=None)
        entry = folder.write(A, "x", writes(b"1"))
        set_age(entry, 0)
        with read_only(path):
            assert folder.find(A, "x") == entry
            assert entry.read_bytes() == b"1"
            with pytest.raises(ArtifactError) as caught:
                folder.write(A, "x", writes(b"2"))
            assert str(caught.value) == f"{entry} cannot be written: Permission denied"
            with pytest.raises(ArtifactError) as caught:
                folder.set_aside(entry, "why")
            assert str(caught.value) == f"{entry} cannot be set aside: Permission denied"
        assert entry.stat().st_mtime == LONG_AGO
        assert files(path) == [f"{A}/x"]


# ---- what is too much, and what is left ---------------------------------------------------------


def test_digests_that_were_not_used_for_longest_are_evicted_first(tmp_path: Path) -> None:
    folder = ArtifactFolder(tmp_path, max_bytes=100)
    for age, (digest, name) in enumerate(((A, "x"), (A, "y"), (B, "x"), (C, "x"))):
        set_age(folder.write(digest, name, writes(bytes(25))), age)
    assert len(folder.entries()) == 4
    assert folder.find(A, "x") is not None  # which makes it the one used last, and its digest
    folder.write(C, "z", writes(bytes(1)))
    assert files(tmp_path) == [f"{A}/x", f"{A}/y", f"{C}/x", f"{C}/z"]
    assert not (tmp_path / B).exists()


def test_the_digest_that_was_written_last_is_never_evicted(tmp_path: Path) -> None:
    folder = ArtifactFolder(tmp_path, max_bytes=10)
    for name in ("x", "y"):
        set_age(folder.write(A, name, writes(bytes(50))), 0)
    assert files(tmp_path) == [f"{A}/x", f"{A}/y"]
    folder.write(B, "x", writes(bytes(50)))
    assert files(tmp_path) == [f"{B}/x"]


def test_a_digest_where_somebody_writes_keeps_its_folder(tmp_path: Path) -> None:
    folder = ArtifactFolder(tmp_path, max_bytes=10)
    folder.write(A, "x", writes(bytes(50)))

    def write(file: BinaryIO) -> None:
        folder.write(B, "x", writes(bytes(50)))  # evicts the digest while an entry is written to it
        assert not (tmp_path / A / "x").exists()

    folder.write(A, "y", write)
    assert files(tmp_path) == [f"{A}/y"]


def test_what_may_not_be_removed_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ArtifactFolder(tmp_path, max_bytes=10)
    old = folder.write(A, "x", writes(bytes(50)))
    remove = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path == old:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        remove(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.warns(RuntimeWarning) as caught:
        new = folder.write(B, "x", writes(b"1"))
    assert str(caught[0].message) == (
        f"{old} cannot be removed, so that the folder stays larger than it should: "
        "Operation not permitted"
    )
    assert caught[0].filename == __file__
    assert new.read_bytes() == b"1"


def test_what_killed_writers_left_is_removed_after_an_hour(folder: ArtifactFolder) -> None:
    now = folder.write(A, "x", writes(b"1")).stat().st_mtime
    for name, age in (("old", 3700.0), ("young", 3500.0)):
        left = folder.path / A / f".writing-host-{name}"
        left.touch()
        os.utime(left, (now - age, now - age))
    folder.write(B, "x", writes(b"1"))
    assert files(folder.path) == [f"{A}/.writing-host-young", f"{A}/x", f"{B}/x"]


# ---- what is damaged ----------------------------------------------------------------------------


def test_what_is_damaged_is_set_aside_with_the_reason(folder: ArtifactFolder) -> None:
    for number in (1, 2):
        path = folder.write(A, "step.gta", writes(b"bad"))
        aside = folder.set_aside(path, "its header is another\ud800")
        assert aside == folder.path / "damaged" / f"{A}-step.gta-{number}"
        assert aside.read_bytes() == b"bad"
        reason = aside.with_name(f"{aside.name}.txt").read_text(encoding="utf-8")
        assert reason == "its header is another\\ud800\n"
        assert folder.find(A, "step.gta") is None
    assert folder.entries() == ()


def test_what_another_job_has_set_aside_is_left_alone(folder: ArtifactFolder) -> None:
    path = folder.write(A, "x", writes(b"bad"))
    folder.set_aside(path, "why")
    assert folder.set_aside(path, "why") is None
    assert files(folder.path) == [f"damaged/{A}-x-1", f"damaged/{A}-x-1.txt"]


def test_of_what_is_damaged_the_newest_are_kept(folder: ArtifactFolder) -> None:
    for number in range(MAX_DAMAGED + 4):
        aside = folder.set_aside(folder.write(A, f"x{number:02}", writes(b"bad")), "why")
        assert aside is not None
        set_age(aside.with_name(f"{aside.name}.txt"), number)
    kept = [f"damaged/{A}-x{number:02}-1" for number in range(4, MAX_DAMAGED + 4)]
    assert files(folder.path) == sorted([*kept, *(f"{name}.txt" for name in kept)])


def test_refuses_to_set_aside_what_is_not_in_the_folder(folder: ArtifactFolder) -> None:
    foreign = folder.path.parent / A / "x"
    with pytest.raises(ValueError, match=f"^{foreign} is of no entry of {folder.path}$"):
        folder.set_aside(foreign, "why")


# ---- killed writers -----------------------------------------------------------------------------


def check_killed_writers(path: Path, *, kills: int, writers: int, max_bytes: int | None) -> None:
    report = report_of_killed_writers(path, kills=kills, writers=writers, max_bytes=max_bytes)
    assert report["problems"] == []
    assert report["left"] == []
    assert report["interrupted"] > kills / 10, "the kills came when nothing was being written"
    assert not report["torch"]
    if max_bytes is None:
        assert report["entries"] == 6
        assert report["read"] == 6 * kills
    else:
        assert report["read"] > kills
        assert report["evicted"] > 0


@pytest.mark.parametrize("max_bytes", [None, 400_000])
def test_entries_are_complete_or_absent_when_writers_are_killed(
    tmp_path: Path, max_bytes: int | None
) -> None:
    check_killed_writers(tmp_path, kills=40, writers=2, max_bytes=max_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("max_bytes", [None, 400_000])
def test_entries_are_complete_or_absent_when_a_thousand_writers_are_killed(
    tmp_path: Path, max_bytes: int | None
) -> None:
    check_killed_writers(tmp_path, kills=1000, writers=2, max_bytes=max_bytes)
