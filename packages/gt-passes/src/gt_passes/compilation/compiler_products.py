"""What Inductor made, kept so that another process need not make it again.

A product is bytes of Inductor's own caches, and code: whoever gives them to ``reuse_products`` must
know where they are from. Inductor finds by the graph, its options and its version whether a product
is of what it compiles, so that one that does not fit costs a compilation and no more.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

import torch

from gt_passes._torch_compilation_internals import inductor_cache_folder

_COLLECTED: ContextVar[list[bytes] | None] = ContextVar("products of compilations", default=None)


@contextmanager
def collected_products() -> Iterator[list[bytes]]:
    """Collect the products of all compilations inside, in order; equal ones once.

    If there are any, the libraries that they need come last, when all is compiled.
    """
    collected: list[bytes] = []
    token = _COLLECTED.set(collected)
    try:
        yield collected
    finally:
        _COLLECTED.reset(token)
    if collected and (libraries := packed_libraries()) is not None:
        collected.append(libraries)


def note_product(product: bytes) -> None:
    """Add a product to what is collected, if anything is."""
    collected = _COLLECTED.get()
    if collected is not None and product not in collected:
        collected.append(product)


def reuse_products(products: Iterable[bytes]) -> None:
    """Put products where later compilations of this process look first."""
    for product in products:
        if are_libraries(product):
            unpack_libraries(product)
        else:
            torch.compiler.load_cache_artifacts(product)


# Shared libraries that Inductor had a C++ compiler build for a CPU, as bytes and back.
#
# The bundles of Inductor's own caches have kernels for GPUs, but for CPUs their sources alone: a
# start that loads a bundle compiles every kernel again. Inductor looks for a library where it
# would build it, under a name that follows from the source and the command line; so libraries
# that lie there are not built. One is for the machine that ``-march=native`` saw, and is offered
# to such only.
_MAGIC = b"gt compiled libraries 1\n"
_NAME = re.compile(r"[a-z0-9]{2}/[a-z0-9]+(\.main)?\.so")
_PROBED = ".load_ok"
"""Ending of Inductor's note that it could load a library with which it probes instruction sets."""


def packed_libraries() -> bytes | None:
    """The libraries that this process has from Inductor's folder; None if there are none.

    Those that are loaded, and those that probe which instruction sets a compiler and the machine
    have. Elsewhere than on Linux nobody says what is loaded.
    """
    machine = _machine()
    folder = inductor_cache_folder().resolve()
    if machine is None:
        return None
    probes = (path.with_name(path.name.removesuffix(_PROBED)) for path in folder.glob("??/*.so.*"))
    found = {path.relative_to(folder).as_posix(): path for path in (*_loaded(folder), *probes)}
    libraries = {
        name: path.read_bytes()
        for name, path in sorted(found.items())
        if _NAME.fullmatch(name) and path.is_file()
    }
    if not libraries:
        return None
    sizes = [[name, len(content)] for name, content in libraries.items()]
    header = json.dumps({"machine": machine, "libraries": sizes}).encode()
    return b"".join((_MAGIC, header, b"\n", *libraries.values()))


def are_libraries(product: bytes) -> bool:
    """Whether that is what ``packed_libraries`` returned."""
    return product.startswith(_MAGIC)


def unpack_libraries(product: bytes) -> None:
    """Put libraries where Inductor looks for them, if they are for such a machine as this.

    Those that are there already stay, and those that cannot be loaded here are left to be built.

    Args:
        product: of ``packed_libraries``; it is code that will run, so it must be trusted.

    Raises:
        ValueError: it is damaged, or names files elsewhere.
        OSError: Inductor's folder cannot be written to; no half of a library is left there.
    """
    header, end, content = product.removeprefix(_MAGIC).partition(b"\n")
    facts = json.loads(header)
    sizes: dict[str, int] = dict(facts["libraries"])
    odd = [name for name in sizes if not _NAME.fullmatch(name)]
    if odd or not end or sum(sizes.values()) != len(content):
        raise ValueError(f"these are no libraries of Inductor's: {odd or 'sizes do not add up'}")
    if facts["machine"] != _machine():
        return
    folder, start = inductor_cache_folder(), 0
    for name, size in sizes.items():
        _put(folder / name, content[start : start + size])
        start += size


def _put(path: Path, content: bytes) -> None:
    """Write a library, complete or not at all."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        if _can_be_loaded(unfinished):
            os.replace(unfinished, path)
    finally:
        with suppress(FileNotFoundError):  # it is in its place
            os.unlink(unfinished)


def _can_be_loaded(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _loaded(folder: Path) -> list[Path]:
    """Files under a folder that are mapped into this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = {line.split(maxsplit=5)[-1] for line in lines if line.endswith(".so")}
    return [Path(file) for file in files if Path(file).is_relative_to(folder)]


def _machine() -> str | None:
    """A digest of what this processor can do and of its C library; None where nothing says it."""
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    except OSError:
        return None
    told = [line for line in first.splitlines() if line.startswith(("model name", "flags"))]
    told += [platform.machine(), *platform.libc_ver()]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()
