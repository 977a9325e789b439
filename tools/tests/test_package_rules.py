"""Each rule on package metadata is broken once, and its message pinned."""

from collections.abc import Callable
from pathlib import Path

from check_workspace import violations
from workspace import Workspace

Load = Callable[[], Workspace]

HIGH = "packages/gt-high/pyproject.toml"


def edit(root: Path, file: str, old: str, new: str) -> None:
    text = (root / file).read_text()
    assert old in text
    (root / file).write_text(text.replace(old, new))


def test_a_sound_workspace_has_no_violation(load: Load) -> None:
    assert list(violations(load())) == []


def test_reports_each_missing_file(root: Path, load: Load) -> None:
    (root / "packages/gt-low/README.md").unlink()
    (root / "packages/gt-low/src/gt_low/__init__.py").unlink()
    (root / "packages/gt-low/src/gt_low/py.typed").unlink()
    (root / "packages/gt-low/tests/test_it.py").unlink()
    assert list(violations(load())) == [
        "required_files: packages/gt-low/README.md is missing",
        "required_files: packages/gt-low/src/gt_low/__init__.py is missing",
        "required_files: packages/gt-low/src/gt_low/py.typed is missing",
        "required_files: packages/gt-low/tests has no test_*.py",
    ]


def test_reports_a_licence_that_differs(root: Path, load: Load) -> None:
    (root / "packages/gt-low/LICENSE").write_text("another licence\n")
    assert list(violations(load())) == [
        "required_files: packages/gt-low/LICENSE differs from the root LICENSE; copy that one"
    ]


def test_reports_project_fields_that_deviate(root: Path, load: Load) -> None:
    edit(root, HIGH, '">=3.11"', '">=3.12"')
    edit(root, HIGH, "hatchling.build", "setuptools.build_meta")
    assert list(violations(load())) == [
        f"project_table: {HIGH}: project.requires-python is '>=3.12', must be '>=3.11'",
        (
            f"project_table: {HIGH}: build-backend is 'setuptools.build_meta', "
            "must be 'hatchling.build'"
        ),
    ]


def test_reports_a_dynamic_version(root: Path, load: Load) -> None:
    edit(root, HIGH, 'version = "0.1.0"', 'version = "0.1.0"\ndynamic = ["version"]')
    assert list(violations(load())) == [
        f"project_table: {HIGH}: the version must be static (project.version, no project.dynamic)"
    ]


def test_reports_a_module_that_states_another_version(root: Path, load: Load) -> None:
    (root / "packages/gt-low/src/gt_low/__init__.py").write_text('__version__ = "0.0.9"\n')
    assert list(violations(load())) == [
        (
            "module_version: packages/gt-low/src/gt_low/__init__.py: "
            "__version__ is '0.0.9', project.version is '0.1.0'"
        )
    ]


def test_reports_a_module_that_states_no_version(root: Path, load: Load) -> None:
    (root / "packages/gt-low/src/gt_low/__init__.py").write_text('"""Nothing."""\n')
    assert list(violations(load())) == [
        (
            "module_version: packages/gt-low/src/gt_low/__init__.py: "
            "__version__ is missing, project.version is '0.1.0'"
        )
    ]


def test_reports_a_readme_that_links_to_files(root: Path, load: Load) -> None:
    (root / "packages/gt-low/README.md").write_text(
        "[a](../../docs/a.md#b) [here](#here) [web](https://example.org)\n"
        "```python\nlinks[0](relative)\n```\n"
    )
    assert list(violations(load())) == [
        (
            "readme_links: packages/gt-low/README.md links to ../../docs/a.md#b, which leads "
            "nowhere from a registry: begin it with https://github.com/graph-trainer/graph-trainer/"
            "blob/main/"
        )
    ]


def test_reports_a_version_that_the_changelog_lacks(root: Path, load: Load) -> None:
    edit(root, HIGH, 'version = "0.1.0"', 'version = "0.1.1"')
    module = "packages/gt-high/src/gt_high/__init__.py"
    edit(root, module, '"0.1.0"', '"0.1.1"')
    assert list(violations(load())) == [
        (
            "changelog_has_version: packages/gt-high/CHANGELOG.md begins with "
            "'## 0.1.0 (unreleased)', must begin with '## 0.1.1'"
        )
    ]


def test_reports_a_sibling_range_without_upper_bound(root: Path, load: Load) -> None:
    edit(root, HIGH, "gt-low>=0.1,<0.2", "gt-low>=0.1")
    assert list(violations(load())) == [
        f"sibling_ranges: {HIGH}: 'gt-low>=0.1' needs a lower and an upper bound"
    ]


def test_reports_a_sibling_range_that_excludes_the_sibling(root: Path, load: Load) -> None:
    edit(root, HIGH, "gt-low>=0.1,<0.2", "gt-low>=0.2,<0.3")
    assert list(violations(load())) == [
        f"sibling_ranges: {HIGH}: 'gt-low<0.3,>=0.2' excludes gt-low 0.1.0"
    ]


def test_reports_a_range_of_an_extra_that_excludes_the_sibling(root: Path, load: Load) -> None:
    extra = '"gt-low>=0.1,<0.2"]\n[project.optional-dependencies]\ngraph = ["gt-low>=0.3,<0.4"]'
    edit(root, HIGH, '"gt-low>=0.1,<0.2"]', extra)
    assert list(violations(load())) == [
        f"sibling_ranges: {HIGH}: 'gt-low<0.4,>=0.3' excludes gt-low 0.1.0"
    ]


def test_reports_a_sibling_without_workspace_source(root: Path, load: Load) -> None:
    edit(root, HIGH, "gt-low = { workspace = true }", "gt-other = { workspace = true }")
    assert list(violations(load())) == [
        f"sibling_ranges: {HIGH}: [tool.uv.sources] needs `gt-low = {{ workspace = true }}`",
        (
            f"sibling_ranges: {HIGH}: [tool.uv.sources] names gt-other, "
            "which is not a declared sibling"
        ),
    ]


def test_reports_a_torch_range_that_excludes_a_tested_version(root: Path, load: Load) -> None:
    edit(root, HIGH, "torch>=2.13,<2.16", "torch>=2.14,<2.16")
    assert list(violations(load())) == [
        f"torch_ranges: {HIGH}: 'torch<2.16,>=2.14' excludes torch 2.13.0, which we test",
        (
            "torch_ranges: packages declare different torch ranges: "
            "{'gt-high': '<2.16,>=2.14', 'gt-low': '<2.16,>=2.13'}"
        ),
    ]


def test_reports_a_torch_matrix_that_deviates(root: Path, load: Load) -> None:
    edit(root, HIGH, '["2.13.0", "2.15.0"]', '["2.13.0"]')
    assert list(violations(load())) == [
        (
            "torch_ranges: packages declare different torch matrices: "
            "{'gt-high': ('2.13.0',), 'gt-low': ('2.13.0', '2.15.0')}"
        ),
        f"torch_ranges: {HIGH}: the torch matrix lacks the default 2.15.0",
    ]


def test_reports_tools_that_are_not_pinned(root: Path, load: Load) -> None:
    edit(root, "pyproject.toml", "pytest==9.2.0", "pytest>=9.2")
    edit(root, "pyproject.toml", "hatchling==1.33.0", "wheel==0.50.0")
    assert list(violations(load())) == [
        (
            "pinned_tools: pyproject.toml: dependency group 'test': 'pytest>=9.2' "
            "must be pinned with =="
        ),
        "pinned_tools: pyproject.toml: tool.uv.build-constraint-dependencies must pin hatchling",
    ]


def test_declared_siblings_are_transitive(root: Path, load: Load) -> None:
    top = root / "packages" / "gt-top"
    top.mkdir()
    (top / "pyproject.toml").write_text('[project]\ndependencies = ["gt-high>=0.1,<0.2"]\n')
    workspace = load()
    assert workspace.declared_siblings("gt-top") == ("gt-high", "gt-low")
    assert workspace.declared_siblings("gt-low") == ()
