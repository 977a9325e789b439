"""The package as a whole: what it exports, what it loads, and how its errors behave."""

import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest

import gt_config
from gt_config import ConfigError, Violation
from gt_config.errors import (
    FieldDifference,
    FingerprintDocumentError,
    FingerprintTypeError,
    GtConfigError,
    NodeMetadataError,
    NodeMetadataVersionError,
    SelectorSyntaxError,
    StaleFingerprintError,
)

VIOLATION = Violation(flag="--compile.x", value=3, allowed="1 or 2", fix="use 1\nor 2")


def test_importing_loads_neither_torch_nor_a_sibling_nor_at_once_what_only_graphs_need():
    program = """
import importlib, pkgutil, sys
import gt_config
assert "gt_config.node_keys" not in sys.modules
for module in pkgutil.iter_modules(gt_config.__path__):
    importlib.import_module(f"gt_config.{module.name}")
unwanted = {"torch", "torchtitan", "numpy", "tyro", "gt_trace", "gt_passes", "gt_pipeline",
            "gt_autoparallel", "gt_trainer"}
print(sorted(unwanted & set(sys.modules)))
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_every_exported_name_is_there_documented_and_in_the_readme():
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    assert len(set(gt_config.__all__)) == len(gt_config.__all__)
    for name in gt_config.__all__:
        exported = getattr(gt_config, name)
        assert exported.__doc__ or not isinstance(exported, type | FunctionType), name
        assert re.search(rf"\b{name}\b", readme), f"{name} is exported, and not in the README"


@pytest.mark.parametrize(
    "error",
    [
        ConfigError([VIOLATION]),
        StaleFingerprintError([FieldDifference(path="a", before="1", after=None)]),
        NodeMetadataVersionError(key="gt.module", found=None, expected=1),
        NodeMetadataError("text"),
        SelectorSyntaxError("text"),
        FingerprintTypeError("text"),
        FingerprintDocumentError("text"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_share_a_base_and_survive_pickling(error):
    assert isinstance(error, GtConfigError)
    assert isinstance(error, TypeError if "Type" in type(error).__name__ else ValueError)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_the_drawn_exception_tree_names_every_error():
    from gt_config import errors

    drawn = errors.__doc__ or ""
    declared = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, GtConfigError)
    }
    assert {name for name in declared if name not in drawn} == set()


def test_config_error_text_lists_each_violation_with_its_parts():
    other = Violation(flag="--compile.y", value="b", allowed="'a'", fix="use 'a'")
    assert str(ConfigError([VIOLATION, other])) == (
        "the configuration has 2 problems:\n"
        "  1. --compile.x is 3\n"
        "     allowed: 1 or 2\n"
        "     fix: use 1\n"
        "     or 2\n"
        "  2. --compile.y is 'b'\n"
        "     allowed: 'a'\n"
        "     fix: use 'a'"
    )


def test_config_error_text_is_singular_for_one_violation():
    assert str(ConfigError([VIOLATION])).startswith("the configuration has 1 problem:\n")
