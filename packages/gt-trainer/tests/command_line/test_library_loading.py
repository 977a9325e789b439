"""PyTorch's library is loaded beside imports, and PyTorch uses it."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import ModuleType

import pytest

from gt_trainer.command_line import library_loading

START = """
import sys, threading
from gt_trainer.command_line.library_loading import load_torch_libraries

def loaded():
    names = (line.rpartition("/")[2].strip() for line in open("/proc/self/maps"))
    return {name for name in names if name.startswith("libtorch")}

load_torch_libraries()
assert "sympy" in sys.modules and "torch" not in sys.modules
assert threading.active_count() == 1
assert loaded() == {"libtorch_global_deps.so", "libtorch_cpu.so"}, loaded()

import torch

assert torch.ones(2).sum().item() == 2
assert sum(line.split()[2] == "00000000" and line.strip().endswith("/libtorch_cpu.so")
           for line in open("/proc/self/maps")) == 1  # and not a second copy of it
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads which libraries are mapped from /proc")
def test_torch_is_imported_on_a_library_that_was_loaded_beside_sympy():
    ran = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]


def test_nothing_is_loaded_where_torch_is_imported_already(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    library_loading.load_torch_libraries(beside=("no_such_module",))


def test_a_library_that_is_not_there_is_left_to_torch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(library_loading, "_LIBRARIES", (("libtorch_elsewhere.so", 0),))
    library_loading.load_torch_libraries(beside=())
    assert threading.active_count() == 1


def test_the_thread_has_ended_also_where_an_import_fails(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(library_loading, "_LIBRARIES", ())
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        library_loading.load_torch_libraries(beside=("no_such_module",))
    assert threading.active_count() == 1
