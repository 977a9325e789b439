"""Cyclic garbage collection held while much is made that lives.

A trace makes hundreds of thousands of objects that all live until it ends; the collector walks them
over and over and finds nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_garbage_collection() -> Iterator[None]:
    """Inside, the collector does not run by itself; afterwards it does if it did before."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
