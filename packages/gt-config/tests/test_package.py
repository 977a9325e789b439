"""The package as a whole: what it exports, what it loads, and how its errors behave."""

import importlib
import pickle
import pkgutil
import subprocess
import sys

import pytest

import gt_config
from gt_config import (
    ConfigError,
    FieldDifference,
    FingerprintDocumentError,
    FingerprintTypeError,
    GtConfigError,
    NodeMetadataError,
    NodeMetadataVersionError,
    SelectorSyntaxError,
    StaleFingerprintError,
    Violation,
)

VIOLATION = Violation(flag="--compile.x", value=3, allowed="1 or 2", fix="use 1\nor 2")


def test_importing_every_module_loads_neither_torch_nor_a_sibling():
    program = """
import importlib, pkgutil, sys
import gt_config
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


def test_every_exported_name_exists_and_is_listed_once():
    assert len(set(gt_config.__all__)) == len(gt_config.__all__)
    assert [name for name in gt_config.__all__ if not hasattr(gt_config, name)] == []


def test_the_package_exports_exactly_what_its_public_modules_export():
    # These have their own namespaces: only those who touch graphs, or judge every option, need them.
    apart = {"node_keys", "graph_kinds", "option_paths"}
    public = [
        module.name
        for module in pkgutil.iter_modules(gt_config.__path__)
        if not module.name.startswith("_") and module.name not in apart
    ]
    exported = {
        name for module in public for name in importlib.import_module(f"gt_config.{module}").__all__
    }
    assert set(gt_config.__all__) == exported


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
