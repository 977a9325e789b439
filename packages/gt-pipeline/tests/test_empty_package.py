"""While gt-pipeline is empty, what it says about itself is true."""

import importlib.metadata
import pkgutil

import gt_pipeline


def test_has_nothing_but_its_version() -> None:
    assert gt_pipeline.__all__ == ["__version__"]
    assert [module.name for module in pkgutil.iter_modules(gt_pipeline.__path__)] == []


def test_says_that_it_is_empty_and_when_that_changes() -> None:
    assert gt_pipeline.__doc__ is not None
    assert "Empty in this version" in gt_pipeline.__doc__
    assert "part 4" in gt_pipeline.__doc__


def test_installed_metadata_agrees() -> None:
    metadata = importlib.metadata.metadata("gt-pipeline")
    assert metadata["Version"] == gt_pipeline.__version__
    assert "Empty until part 4" in metadata["Summary"]
    assert importlib.metadata.requires("gt-pipeline") is None
