"""While gt-autoparallel is empty, what it says about itself is true."""

import importlib.metadata
import pkgutil

import gt_autoparallel


def test_has_nothing_but_its_version() -> None:
    assert gt_autoparallel.__all__ == ["__version__"]
    assert [module.name for module in pkgutil.iter_modules(gt_autoparallel.__path__)] == []


def test_says_that_it_is_empty_and_when_that_changes() -> None:
    assert gt_autoparallel.__doc__ is not None
    assert "Empty in this version" in gt_autoparallel.__doc__
    assert "part 5" in gt_autoparallel.__doc__


def test_installed_metadata_agrees() -> None:
    metadata = importlib.metadata.metadata("gt-autoparallel")
    assert metadata["Version"] == gt_autoparallel.__version__
    assert "Empty until part 5" in metadata["Summary"]
    assert importlib.metadata.requires("gt-autoparallel") is None
