"""What a package's siblings are, with its extras and without."""

from collections.abc import Callable
from pathlib import Path

from smoke import Variant, variants_of
from workspace import Workspace

Load = Callable[[], Workspace]


def add_a_top_package(root: Path, *, asks_for: str) -> None:
    """Makes gt-high's dependency on gt-low an extra, and adds gt-top, which depends on gt-high."""
    high = root / "packages/gt-high/pyproject.toml"
    text = high.read_text().replace(', "gt-low>=0.1,<0.2"]', "]")
    high.write_text(f'{text}\n[project.optional-dependencies]\ngraph = ["gt-low>=0.1,<0.2"]\n')
    top = root / "packages/gt-top"
    top.mkdir()
    (top / "pyproject.toml").write_text(
        f'[project]\nname = "gt-top"\nversion = "0.1.0"\ndependencies = ["{asks_for}"]\n'
    )


def test_siblings_of_an_extra_count_only_with_it(root: Path, load: Load) -> None:
    add_a_top_package(root, asks_for="gt-high>=0.1,<0.2")
    assert load().declared_siblings("gt-high") == ()
    assert load().declared_siblings("gt-high", extras=["graph"]) == ("gt-low",)
    assert load().declared_siblings("gt-top") == ("gt-high",)


def test_a_sibling_is_followed_with_the_extra_that_is_asked_of_it(root: Path, load: Load) -> None:
    add_a_top_package(root, asks_for="gt-high[graph]>=0.1,<0.2")
    assert load().declared_siblings("gt-top") == ("gt-high", "gt-low")


def test_a_package_with_an_extra_is_installed_without_and_with_it(root: Path, load: Load) -> None:
    add_a_top_package(root, asks_for="gt-high>=0.1,<0.2")
    variants = variants_of(load(), ["gt-low", "gt-high"])
    assert variants == [
        Variant(package="gt-low"),
        Variant(package="gt-high"),
        Variant(package="gt-high", extra="graph"),
    ]
    assert [str(variant) for variant in variants] == ["gt-low", "gt-high", "gt-high[graph]"]
