"""What the package exports, and that its metadata agrees with it."""

from __future__ import annotations

import importlib.metadata

import gt_autoparallel


def test_exports_exactly_what_it_says() -> None:
    assert sorted(gt_autoparallel.__all__) == gt_autoparallel.__all__
    late = gt_autoparallel._MODULE_OF
    assert {*late, "__version__"} == set(gt_autoparallel.__all__)
    for name in gt_autoparallel.__all__:
        assert getattr(gt_autoparallel, name) is not None


def test_unknown_names_are_attribute_errors() -> None:
    assert not hasattr(gt_autoparallel, "find_placements")


def test_installed_metadata_agrees() -> None:
    metadata = importlib.metadata.metadata("gt-autoparallel")
    assert metadata["Version"] == gt_autoparallel.__version__
