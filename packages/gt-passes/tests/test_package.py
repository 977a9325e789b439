"""The public surface of the package."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import gt_passes
from gt_passes import errors

README = Path(__file__).parents[1] / "README.md"


def test_every_public_name_exists_and_says_what_it_is():
    undocumented = [
        name
        for name in gt_passes.__all__
        if inspect.isroutine(getattr(gt_passes, name)) or inspect.isclass(getattr(gt_passes, name))
        if not getattr(gt_passes, name).__doc__
    ]
    assert undocumented == []


def test_every_error_stands_in_the_tree():
    tree = errors.__doc__ or ""
    for name, error in vars(errors).items():
        if name.startswith("_") or not (
            isinstance(error, type) and error.__module__ == errors.__name__
        ):
            continue
        assert issubclass(error, errors.GtPassesError)
        assert name in tree
        for base in (ValueError, TypeError, RuntimeError):
            if issubclass(error, base):
                assert re.search(rf"{name} +\({base.__name__}\)", tree)
