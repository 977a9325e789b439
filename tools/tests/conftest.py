"""A small workspace that breaks no rule, for tests that break one at a time."""

from collections.abc import Callable
from pathlib import Path

import pytest

from workspace import Workspace, load_workspace

ROOT = """
[tool.uv]
build-constraint-dependencies = ["hatchling==1.33.0"]

[dependency-groups]
defaults = ["torch==2.15.0"]
test = ["pytest==9.2.0"]
dev = [{ include-group = "defaults" }]
"""

MEMBER = """
[build-system]
requires = ["hatchling>=1.27,<2"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "0.1.0"
readme = "README.md"
license = "BSD-3-Clause"
license-files = ["LICENSE"]
requires-python = ">=3.11"
dependencies = {dependencies}

[tool.uv.sources]
{sources}

[[tool.hatch.envs.torch.matrix]]
torch = ["2.13.0", "2.15.0"]
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Folder of a workspace with `gt-low`, and `gt-high` that depends on it."""
    (tmp_path / "pyproject.toml").write_text(ROOT)
    (tmp_path / "LICENSE").write_text("licence text\n")
    members = {
        "gt-low": ('["torch>=2.13,<2.16"]', ""),
        "gt-high": (
            '["torch>=2.13,<2.16", "gt-low>=0.1,<0.2"]',
            "gt-low = { workspace = true }",
        ),
    }
    for name, (dependencies, sources) in members.items():
        package = tmp_path / "packages" / name
        module = package / "src" / name.replace("-", "_")
        module.mkdir(parents=True)
        (module / "py.typed").touch()
        (module / "__init__.py").write_text('__version__ = "0.1.0"\nimport torchtitan.models\n')
        (package / "tests").mkdir()
        (package / "tests" / "test_it.py").write_text("def test_it() -> None: ...\n")
        (package / "README.md").write_text(f"# {name}\n")
        (package / "CHANGELOG.md").write_text("# Changelog\n\n## 0.1.0 (unreleased)\n")
        (package / "LICENSE").write_text("licence text\n")
        (package / "pyproject.toml").write_text(
            MEMBER.format(name=name, dependencies=dependencies, sources=sources)
        )
    return tmp_path


@pytest.fixture
def load(root: Path) -> Callable[[], Workspace]:
    """Loads the workspace at `root` as it is now, taking every file as tracked."""

    def load_now() -> Workspace:
        files = (path for path in root.rglob("*") if path.is_file())
        return load_workspace(
            root, tracked=tuple(sorted(str(path.relative_to(root)) for path in files))
        )

    return load_now
