"""Whether Python found compiled what it imported, or compiles it anew at each start.

Of the ten processor seconds that importing torchtitan takes without bytecode, six to seven are
Python's compiler. pip writes bytecode when it installs, uv only when told to, and an import writes
it unless ``PYTHONDONTWRITEBYTECODE`` or the folder forbids it, as in many container images.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType


def hint_to_compile(module: ModuleType) -> str | None:
    """Return what to do if an imported module has no bytecode that the next start will find.

    Args:
        module: It stands for what is installed beside it.
    """
    cached = module.__spec__.cached if module.__spec__ is not None else None
    if cached is None or Path(cached).exists() or module.__file__ is None:
        return None
    reason = "PYTHONDONTWRITEBYTECODE is set" if sys.dont_write_bytecode else "none can be written"
    return (
        f"{module.__name__} has no bytecode and {reason}, so every start compiles what it imports, "
        f"which is most of the time that imports take. Once and for all:\n"
        f"  {sys.executable} -m compileall -q {Path(module.__file__).parents[1]}"
    )
