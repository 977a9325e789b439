"""The public surface is documented, and importing it stays light."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest

import gt_trace
import gt_trace.fsdp
import gt_trace.joint
import gt_trace.stamping


@pytest.mark.parametrize(
    "package",
    [gt_trace, gt_trace.fsdp, gt_trace.joint, gt_trace.stamping],
    ids=lambda p: p.__name__,
)
def test_every_public_name_exists_and_says_what_it_is(package: Any) -> None:
    undocumented = [
        name
        for name in package.__all__
        if inspect.isroutine(getattr(package, name)) or inspect.isclass(getattr(package, name))
        if not getattr(package, name).__doc__
    ]
    assert undocumented == []


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, gt_trace; "
        "heavy = ('testing', 'fsdp', 'joint', 'stamping', '_torch_joint_internals'); "
        "print([m for m in heavy if f'gt_trace.{m}' in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
