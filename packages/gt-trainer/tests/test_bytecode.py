import importlib.util
import py_compile
import sys

import pytest

from gt_trainer.late_imports import hint_to_compile


@pytest.fixture
def installed(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "pycache_prefix", None)
    folder = tmp_path / "site-packages" / "thing"
    folder.mkdir(parents=True)
    source = folder / "__init__.py"
    source.write_text("")

    def load():
        spec = importlib.util.spec_from_file_location("thing", source)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return source, load


def test_a_package_that_every_start_compiles_is_told_with_the_command_that_ends_it(
    installed, monkeypatch
):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    source, load = installed
    assert hint_to_compile(load()) == (
        "thing has no bytecode and PYTHONDONTWRITEBYTECODE is set, so every start compiles what "
        "it imports, which is most of the time that imports take. Once and for all:\n"
        f"  {sys.executable} -m compileall -q {source.parents[1]}"
    )


def test_a_package_with_bytecode_is_not_told_of_whoever_wrote_it(installed, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    source, load = installed
    py_compile.compile(str(source))
    assert hint_to_compile(load()) is None


def test_the_import_itself_may_have_written_it(installed, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert hint_to_compile(installed[1]()) is None
