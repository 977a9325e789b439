"""The public surface is documented, and importing it stays light."""

from __future__ import annotations

import inspect
import subprocess
import sys

import gt_trace


def test_every_public_name_exists_and_says_what_it_is() -> None:
    undocumented = [
        name
        for name in gt_trace.__all__
        if inspect.isroutine(getattr(gt_trace, name)) or inspect.isclass(getattr(gt_trace, name))
        if not getattr(gt_trace, name).__doc__
    ]
    assert undocumented == []


def test_importing_the_package_starts_no_workers_and_no_sharding() -> None:
    code = (
        "import sys, gt_trace; "
        "print([m for m in ('gt_trace.testing', 'gt_trace.fsdp') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
