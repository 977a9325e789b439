"""Models that the installed torchtitan has beyond the catalog, found without importing it."""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path

from gt_trainer.models.catalog import CATALOG

_REGISTRY = "config_registry"


@functools.cache
def torchtitan_modules() -> tuple[str, ...]:
    """Names of torchtitan's models that are not in the catalog, sorted."""
    found = importlib.util.find_spec("torchtitan")
    folders = [] if found is None else list(found.submodule_search_locations or ())
    names = {
        path.parent.name
        for folder in folders
        for path in Path(folder, "models").glob(f"*/{_REGISTRY}.py")
    }
    return tuple(sorted(names - CATALOG.keys()))


def torchtitan_configs(module: str) -> tuple[str, ...]:
    """Names of the configurations of one of these models, as its file has them; () of none.

    Args:
        module: Name of the model.
    """
    if module not in torchtitan_modules():
        return ()
    found = importlib.util.find_spec("torchtitan")
    assert found is not None
    for folder in found.submodule_search_locations or ():
        path = Path(folder, "models", module, f"{_REGISTRY}.py")
        if path.is_file():
            body = ast.parse(path.read_text(encoding="utf-8")).body
            functions = [each.name for each in body if isinstance(each, ast.FunctionDef)]
            return tuple(name for name in functions if not name.startswith("_"))
    return ()


def is_own_module(module: str) -> bool:
    """Whether ``--module`` names a Python module of the user's, with a dot in its path or without.

    Args:
        module: As given. What the catalog or torchtitan calls so comes first.
    """
    if "." in module:
        return True
    if module in CATALOG or module in torchtitan_modules():
        return False
    return module.isidentifier() and importlib.util.find_spec(module) is not None


def python_module(module: str) -> str:
    """The dotted path of what ``--module`` names.

    Args:
        module: A name of the catalog or of torchtitan's models, or the path of a user's own.
    """
    if is_own_module(module):
        return module
    if module in CATALOG:
        return f"gt_trainer.models.{module}"
    return f"torchtitan.models.{module}.{_REGISTRY}"
