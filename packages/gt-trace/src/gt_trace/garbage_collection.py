"""Python's cyclic garbage collector, held back where much is made that lives on. Imports no torch.

A graph of a large model is a million objects that refer to one another. The collector looks
through all of them again and again while they are made, finds nothing, and takes most of the time.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def held_garbage_collection() -> Iterator[None]:
    """Inside, the collector does not run by itself: what is made lives until the end."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
