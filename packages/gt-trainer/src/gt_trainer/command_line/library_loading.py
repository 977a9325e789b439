"""PyTorch's largest library is loaded by a second thread, while Python imports SymPy.

The system relocates 450 MB and runs the library's own start, in which Python has no part: a fifth
of a second of a start's three, on a core that nobody else uses then. SymPy, which PyTorch imports
anyway, needs nothing of it. PyTorch finds its library loaded, and does the rest as it always does.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

_LIBRARIES = (
    # In the order and with the visibility with which PyTorch itself loads them.
    ("libtorch_global_deps.so", ctypes.RTLD_GLOBAL),
    ("libtorch_cpu.so", ctypes.RTLD_LOCAL),
)
_BESIDE = ("sympy", "numpy")


def load_torch_libraries(beside: Sequence[str] = _BESIDE) -> None:
    """Load what ``import torch`` will load first, and import modules that do not need it meanwhile.

    When this returns, the thread has ended: a process with another thread must not be forked. Where
    there is no such library under that name, or it cannot be loaded so, PyTorch will load its own.

    Args:
        beside: modules, none of which imports torch.
    """
    if "torch" in sys.modules:
        return
    thread = threading.Thread(target=_load)
    thread.start()
    try:
        for name in beside:
            importlib.import_module(name)
    finally:
        thread.join()


def _load() -> None:
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return
    for name, mode in _LIBRARIES:
        path = Path(torch.origin).parent / "lib" / name
        try:
            ctypes.CDLL(str(path), mode=mode)
        except OSError:  # macOS, an editable build, CUDA elsewhere: PyTorch knows them
            return
