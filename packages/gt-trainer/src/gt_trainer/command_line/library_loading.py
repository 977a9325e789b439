"""PyTorch's largest library is loaded by a second thread, while Python imports SymPy.

The system relocates 450 MB and runs the library's own start, a fifth of a second in which Python
has no part, on a core that nobody else uses then. SymPy, which PyTorch imports anyway, needs
nothing of it. PyTorch finds its library loaded, and does the rest as it always does.

Two locks would undo this. ``ctypes.CDLL`` keeps Python's own while it loads, and functions that are
called through it do not, so that ``dlopen`` is called as one. And the dynamic linker has a lock of
its own, for which any extension module would wait: those that SymPy imports come before.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
import threading
from pathlib import Path

_LIBRARIES = (
    # In the order and with the visibility with which PyTorch itself loads them.
    ("libtorch_global_deps.so", os.RTLD_NOW | os.RTLD_GLOBAL),
    ("libtorch_cpu.so", os.RTLD_NOW | os.RTLD_LOCAL),
)
_EXTENSIONS = ("cmath", "decimal", "unicodedata")
_BESIDE = "sympy"


def load_torch_libraries() -> None:
    """Load what ``import torch`` will load first, and import SymPy meanwhile.

    When this returns, the thread has ended: a process with another thread must not be forked. Where
    there is no such library under that name, or it cannot be loaded so, PyTorch will load its own.
    """
    if "torch" in sys.modules:
        return
    for name in _EXTENSIONS:
        importlib.import_module(name)
    thread = threading.Thread(target=_load)
    thread.start()
    try:
        importlib.import_module(_BESIDE)
    finally:
        thread.join()


def _load() -> None:
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return
    load = ctypes.CDLL(None).dlopen
    load.argtypes, load.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
    for name, mode in _LIBRARIES:
        path = Path(torch.origin).parent / "lib" / name
        # None on macOS, of an editable build, or with CUDA elsewhere: PyTorch knows these.
        if load(os.fsencode(path), mode) is None:
            return
