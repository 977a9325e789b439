"""The public surface is what ``__all__`` says, and importing it stays light."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import gt_trace


def test_every_public_name_exists_and_is_listed_in_order() -> None:
    for info in pkgutil.iter_modules(gt_trace.__path__, "gt_trace."):
        module = importlib.import_module(info.name)
        assert list(module.__all__) == sorted(module.__all__, key=_ruff_order), info.name
        for name in module.__all__:
            assert hasattr(module, name), f"{info.name}.{name}"
    for name in gt_trace.__all__:
        assert hasattr(gt_trace, name)


def test_importing_the_package_starts_no_workers_and_no_sharding() -> None:
    code = (
        "import sys, gt_trace; "
        "print([m for m in ('gt_trace.testing', 'gt_trace.fsdp') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def _ruff_order(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions: the order that the linter keeps."""
    if name.isupper():
        return (0, name)
    return (1 if name[0].isupper() else 2, name)
