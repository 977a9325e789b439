"""What Inductor made, kept so that another process need not make it again.

A product is bytes of Inductor's own caches, and code: whoever gives them to ``reuse_products`` must
know where they are from. Inductor finds by the graph, its options and its version whether a product
is of what it compiles, so that one that does not fit costs a compilation and no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from gt_passes.compilation.compiled_libraries import (
    are_libraries,
    packed_libraries,
    unpack_libraries,
)

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
