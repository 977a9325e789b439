"""PyTorch's library is loaded beside the import of SymPy, and PyTorch uses it."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import ModuleType

import pytest

from gt_trainer.command_line import library_loading

START = """
import importlib, sys, threading
from gt_trainer.command_line import cli, library_loading

def mapped():
    names = (line.rpartition("/")[2].strip() for line in open("/proc/self/maps"))
    return [name for name in names if name.startswith("libtorch")]

for name in library_loading._EXTENSIONS:
    importlib.import_module(name)
before = set(sys.modules)
library_loading.load_torch_libraries()
beside = {name: getattr(sys.modules[name], "__file__", None) for name in {*sys.modules} - before}
assert "sympy" in beside and "torch" not in beside
waited = [name for name, file in beside.items() if file and file.endswith(".so")]
assert not waited, f"extension modules wait for the library: {waited}"
assert threading.active_count() == 1
assert {*mapped()} == {"libtorch_global_deps.so", "libtorch_cpu.so"}, mapped()

num_maps = mapped().count("libtorch_cpu.so")
import torch

assert torch.ones(2).sum().item() == 2
assert mapped().count("libtorch_cpu.so") == num_maps  # it is not loaded once more
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads which libraries are mapped from /proc")
def test_torch_is_imported_on_a_library_that_was_loaded_beside_sympy():
    ran = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]


def test_nothing_is_loaded_where_torch_is_imported_already(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    monkeypatch.setattr(library_loading, "_BESIDE", "no_such_module")
    library_loading.load_torch_libraries()


def test_a_library_that_is_not_there_is_left_to_torch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(library_loading, "_LIBRARIES", (("libtorch_elsewhere.so", 2),))
    library_loading.load_torch_libraries()
    assert threading.active_count() == 1


def test_the_thread_has_ended_also_where_the_import_fails(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(library_loading, "_LIBRARIES", ())
    monkeypatch.setattr(library_loading, "_BESIDE", "no_such_module")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        library_loading.load_torch_libraries()
    assert threading.active_count() == 1
