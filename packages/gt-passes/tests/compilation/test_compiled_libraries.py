"""Libraries that Inductor built come back where it looks for them, on a machine like the first."""

from __future__ import annotations

import _ctypes
import ctypes
import errno
import json
import os
import shutil
import sys
from pathlib import Path
from typing import IO

import pytest

from gt_passes.compilation import compiler_products
from gt_passes.compilation.compiler_products import (
    are_libraries,
    packed_libraries,
    unpack_libraries,
)

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(_ctypes, "__file__"),
    reason="only Linux says what is loaded, and a library of Python's stands for one of Inductor's",
)

NAME = "ab/cabc2.main.so"


@pytest.fixture
def product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A library that was loaded from Inductor's folder, packed; that folder is another one now."""
    folder = tmp_path / "first"
    path = folder / NAME
    path.parent.mkdir(parents=True)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    assert packed_libraries() is None
    shutil.copy(str(_ctypes.__file__), path)
    shutil.copy(path, folder / "ab/cnever.so")
    assert packed_libraries() is None
    ctypes.CDLL(str(path))
    packed = packed_libraries()
    assert packed is not None
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "second"))
    return packed


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_what_was_loaded_comes_back(product: bytes, tmp_path: Path):
    assert are_libraries(product)
    assert not are_libraries(b"a bundle of Inductor's")
    unpack_libraries(product)
    assert files(tmp_path / "second") == [NAME]
    second = tmp_path / "second" / NAME
    assert second.read_bytes() == (tmp_path / "first" / NAME).read_bytes()
    second.unlink()  # it is loaded: a process whose library is cut off dies when it ends
    second.write_bytes(b"of another job")
    unpack_libraries(product)
    assert second.read_bytes() == b"of another job"


def test_what_probes_instruction_sets_comes_back_without_the_note_that_it_could(
    product: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "first"))
    (tmp_path / "first/ab/cnever.so.load_ok").touch()
    packed = packed_libraries()
    assert packed is not None
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "second"))
    unpack_libraries(packed)
    assert files(tmp_path / "second") == [NAME, "ab/cnever.so"]


def test_another_machine_builds_its_own(
    product: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(compiler_products, "_machine", lambda: "another")
    unpack_libraries(product)
    assert files(tmp_path) == ["first/ab/cabc2.main.so", "first/ab/cnever.so"]


def test_what_cannot_be_loaded_is_left_to_be_built(product: bytes, tmp_path: Path):
    header, _, content = product.partition(b"\n")[2].partition(b"\n")
    magic = product.partition(b"\n")[0]
    unpack_libraries(b"\n".join((magic, header, bytes(len(content)))))
    assert files(tmp_path / "second") == []


def test_nothing_is_left_of_a_library_that_a_full_disk_cuts_off(
    product: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    open_as_before = os.fdopen
    monkeypatch.setattr(os, "fdopen", lambda handle, mode: FullDisk(open_as_before(handle, mode)))
    with pytest.raises(OSError, match="No space left"):
        unpack_libraries(product)
    assert (tmp_path / "second/ab").is_dir()
    assert files(tmp_path / "second") == []


class FullDisk:
    """A file of which no more than the first bytes find room."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, content: bytes) -> None:
        self._file.write(content[:9])
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("name", ["../outside.so", "/etc/x.so", "ab/c/../../d.so", "ab/c.py"])
def test_names_of_files_elsewhere_are_refused(name: str, product: bytes, tmp_path: Path):
    magic, header, content = product.split(b"\n", 2)
    facts = json.loads(header)
    facts["libraries"][0][0] = name
    with pytest.raises(ValueError, match=r"these are no libraries of Inductor's: \['"):
        unpack_libraries(b"\n".join((magic, json.dumps(facts).encode(), content)))
    assert not (tmp_path / "second").exists() or files(tmp_path / "second") == []


def test_sizes_that_do_not_add_up_are_refused(product: bytes):
    with pytest.raises(ValueError, match="sizes do not add up"):
        unpack_libraries(product[:-1])
