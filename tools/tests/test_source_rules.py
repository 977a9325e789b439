"""Each rule on tracked files is broken once, and its message pinned.

Forbidden strings are put together here from pieces, since this file is tracked too.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from check_workspace import violations
from workspace import Workspace

Load = Callable[[], Workspace]


def test_reports_a_tracked_lock_file(root: Path, load: Load) -> None:
    (root / "uv.lock").touch()
    assert list(violations(load())) == [
        "no_lock_file: uv.lock is tracked; lock files are not committed: `git rm --cached uv.lock`"
    ]


@pytest.mark.parametrize("folder", ["home", "root", "Users", "work"])
def test_reports_a_machine_path(root: Path, load: Load, folder: str) -> None:
    path = "/" + folder + "/someone"
    (root / "notes.md").write_text(f"first line\nsee `{path}/run.log`\n")
    assert list(violations(load())) == [
        f"no_machine_in_text: notes.md:2 names a machine path: '{path}'"
    ]


@pytest.mark.parametrize(
    "text", ["~/work/run.log", "outputs/work/run", "https://host/home/page", "${DIR}/home/x"]
)
def test_accepts_paths_that_are_relative_to_something(root: Path, load: Load, text: str) -> None:
    (root / "notes.md").write_text(text)
    assert list(violations(load())) == []


def test_reports_a_registry_host(root: Path, load: Load) -> None:
    host = "files." + "pythonhosted.org"
    (root / "notes.md").write_text(f"https://{host}/packages/x.whl\n")
    assert list(violations(load())) == [
        f"no_machine_in_text: notes.md:1 names a registry: '{host}'"
    ]


def test_accepts_binary_files(root: Path, load: Load) -> None:
    (root / "blob.bin").write_bytes(b"\0/home/" + b"someone")
    assert list(violations(load())) == []


@pytest.mark.parametrize(
    ("statement", "module"),
    [
        ("import torchtitan.experiments", "torchtitan.experiments"),
        ("import torchtitan.experiments.x as x", "torchtitan.experiments.x"),
        ("from torchtitan.experiments.x import y", "torchtitan.experiments.x"),
        ("from torchtitan import experiments", "torchtitan.experiments"),
        ("importlib.import_module('torchtitan.experiments.x')", "torchtitan.experiments.x"),
        ("__import__('torchtitan.experiments')", "torchtitan.experiments"),
    ],
)
def test_reports_an_import_of_experiments(
    root: Path, load: Load, statement: str, module: str
) -> None:
    (root / "packages/gt-high/src/gt_high/peer.py").write_text(f"\n{statement}\n")
    messages = list(violations(load()))
    assert messages[0] == (
        f"no_forbidden_import: packages/gt-high/src/gt_high/peer.py:2 imports {module}"
    )


def test_accepts_experiments_as_a_peer_in_benchmarks(root: Path, load: Load) -> None:
    (root / "benchmarks").mkdir()
    (root / "benchmarks/bench_peer.py").write_text("import torchtitan.experiments\n")
    assert list(violations(load())) == []


def test_reports_a_vague_file_name(root: Path, load: Load) -> None:
    (root / "packages/gt-high/src/gt_high/utils.py").touch()
    assert list(violations(load())) == [
        (
            "no_vague_name: packages/gt-high/src/gt_high/utils.py: "
            "name the file for its one idea (STYLE.md, Names)"
        )
    ]


@pytest.mark.parametrize(
    "definition", ["class Timeline: ...", "Timeline = Literal['a']", "Timeline: T = Literal['a']"]
)
def test_reports_a_public_name_of_two_packages(root: Path, load: Load, definition: str) -> None:
    (root / "packages/gt-high/src/gt_high/simulation.py").write_text(f"\n{definition}\n")
    (root / "packages/gt-low/src/gt_low/costs").mkdir()
    (root / "packages/gt-low/src/gt_low/costs/streams.py").write_text("class Timeline: ...\n")
    assert list(violations(load())) == [
        (
            "no_name_with_two_meanings: packages/gt-high/src/gt_high/simulation.py:2 and "
            "packages/gt-low/src/gt_low/costs/streams.py:1 each define Timeline: "
            "name each for what it is"
        )
    ]


@pytest.mark.parametrize(
    "definition", ["class _Run: ...", "class A:\n    class Config: ...", "Names = list[str]"]
)
def test_accepts_private_nested_and_other_names_twice(
    root: Path, load: Load, definition: str
) -> None:
    (root / "packages/gt-high/src/gt_high/one.py").write_text(definition)
    (root / "packages/gt-low/src/gt_low/two.py").write_text(
        definition.replace("class A", "class B")
    )
    assert list(violations(load())) == []


EXPORT = (
    'from gt_low.timeline import SomeLine\n\n__version__ = "0.1.0"\n'
    '__all__ = ["SomeLine", "__version__"]\n'
)


def test_reports_an_export_that_only_its_own_package_imports(root: Path, load: Load) -> None:
    (root / "packages/gt-low/src/gt_low/__init__.py").write_text(EXPORT)
    (root / "packages/gt-low/src/gt_low/costs.py").write_text("from gt_low import SomeLine\n")
    (root / "packages/gt-low/tests/test_it.py").write_text("from gt_low import SomeLine\n")
    assert list(violations(load())) == [
        (
            "every_export_is_used: packages/gt-low/src/gt_low/__init__.py exports SomeLine, which "
            "nothing outside of it imports and no README names: take it out of `__all__`, and "
            "import it from its module"
        )
    ]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("packages/gt-high/src/gt_high/it.py", "from gt_low import SomeLine"),
        ("benchmarks/bench_it.py", "from gt_low import SomeLine"),
        ("packages/gt-low/README.md", "`SomeLine` draws."),
        ("packages/gt-low/README.md", "`some-line` draws."),
    ],
)
def test_accepts_an_export_that_is_used_or_promised(
    root: Path, load: Load, file: str, text: str
) -> None:
    (root / "packages/gt-low/src/gt_low/__init__.py").write_text(EXPORT)
    (root / file).parent.mkdir(exist_ok=True)
    (root / file).write_text(f"{text}\n")
    assert list(violations(load())) == []


def test_accepts_an_export_of_a_folder_that_its_package_imports(root: Path, load: Load) -> None:
    (root / "packages/gt-low/src/gt_low/lines").mkdir()
    (root / "packages/gt-low/src/gt_low/lines/__init__.py").write_text(EXPORT)
    (root / "packages/gt-low/src/gt_low/costs.py").write_text("from gt_low.lines import SomeLine\n")
    assert list(violations(load())) == []
