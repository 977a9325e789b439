"""What torchtitan's modules import and a run may never use, imported when it is first used.

torchtitan's validator imports ``datasets``, with pandas and pyarrow under it, for a text data set;
a class body and two modules of it make FlexAttention a compiled function, for which PyTorch imports
all of Inductor; and PyTorch imports ``networkx`` for one of its partitioners. Of the four processor
seconds of a start's imports that is one and a half, and a run on a CPU with our data loader uses
none of them.

Nothing of torchtitan or PyTorch is changed. Around the import, a package is given by a finder of
imports, Python's own hook for that, whose names stand for those of the package and import it once
they are called, asked for an attribute, or compared with an object; and PyTorch's variable
``TORCHDYNAMO_DISABLE`` says that functions stay as they are.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_NO_COMPILATION = "TORCHDYNAMO_DISABLE"
_DATA_SETS = "torchtitan.hf_datasets."


@contextmanager
def imported_when_used(package: str) -> Iterator[None]:
    """Inside, whoever imports names from ``package`` gets names that import it when they are used.

    They can be called, have the attributes of what they stand for, and tell its instances; they are
    no classes that one can inherit from. A package that was imported before stays as it is.

    Args:
        package: its name, without a dot; modules in it are meant too.
    """
    if package in sys.modules:
        yield
        return
    finder = _LateFinder(package)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name, module in list(sys.modules.items()):
            if isinstance(module, _LateModule) and finder.finds(name):
                del sys.modules[name]


@contextmanager
def compiling_nothing() -> Iterator[None]:
    """Inside, ``torch.compile`` returns what it is given, so that Inductor is not imported."""
    before = os.environ.get(_NO_COMPILATION)
    os.environ[_NO_COMPILATION] = "1"
    try:
        yield
    finally:
        del os.environ[_NO_COMPILATION]
        if before is not None:
            os.environ[_NO_COMPILATION] = before


def left_out(config: Any) -> list[str]:
    """Modules that were left out and that a run of this configuration will use.

    A launcher imports them before it forks: each rank would else import them for itself.

    Args:
        config: torchtitan's, with this project's ``compile`` options.
    """
    loaders = [config.dataloader]
    if config.validator.enable:
        loaders.append(config.validator.dataloader)
    bases = {base.__module__ for loader in loaders for base in type(loader).__mro__}
    options = config.compile
    used = ["torch._inductor.compile_fx"] if options.inductor_compilation != "none" else []
    if (options.mode, options.joint_partitioner) == ("aot_joint", "min_cut"):
        used.append("networkx")
    if any(module.startswith(_DATA_SETS) for module in bases):
        used.append("datasets")
    return used


# Of the ten processor seconds that importing torchtitan takes without bytecode, six to seven are
# Python's compiler. pip writes bytecode when it installs, uv only when told to. An import writes it
# unless PYTHONDONTWRITEBYTECODE or the folder forbids it, as in many container images.
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


class _LateFinder(MetaPathFinder, Loader):
    def __init__(self, package: str) -> None:
        self._package = package

    def finds(self, name: str) -> bool:
        return name.partition(".")[0] == self._package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if self.finds(fullname) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _LateModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Later, by whoever uses a name of it."""


class _LateModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what the import system asks for is not the package's
            raise AttributeError(name)
        return _LateName(self.__name__, name)


class _LateName:
    __slots__ = ("_module", "_name")

    def __init__(self, module: str, name: str) -> None:
        self._module = module
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._meant()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._meant(), name)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self._meant())

    def __repr__(self) -> str:
        return f"<{self._module}.{self._name}, imported when it is used>"

    def _meant(self) -> Any:
        return getattr(importlib.import_module(self._module), self._name)
