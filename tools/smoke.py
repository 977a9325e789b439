"""`make smoke`: each wheel, with its declared siblings only, passes its own tests.

For every package, and again for each extra it has, a fresh environment gets that wheel, the wheels
of the siblings it declares (directly or through one another), their third-party dependencies at the
workspace's default versions, and the test tools: nothing else of ours, no source tree. The tests
are copied out of the repository, so that nothing imports from `src/`. What this catches and `make
test` cannot: an undeclared dependency, a file missing from the wheel, a test that leans on another
package, an import that became slow.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from workspace import Workspace, load_workspace

_IMPORT_CHECK = """
import importlib.util, pathlib, sys
here, wanted, unwanted = pathlib.Path(sys.prefix).resolve(), sys.argv[1], sys.argv[2:]
found = importlib.util.find_spec(wanted)
assert found and found.origin, f"{wanted} is not installed, or has no __init__.py: {found}"
assert here in pathlib.Path(found.origin).resolve().parents, f"{wanted}: not the wheel: {found}"
leaked = [name for name in unwanted if importlib.util.find_spec(name)]
assert not leaked, f"not declared by {wanted}, yet importable: {leaked}"
"""

_IMPORT_TIME = """
import importlib, sys, time
wanted, *before = sys.argv[1:]
for name in before:
    importlib.import_module(name)
start = time.process_time()
importlib.import_module(wanted)
print(time.process_time() - start)
"""

_STARTS = 5


class SlowImportError(Exception):
    """An import takes longer than it may."""


class UnreadableImportTimeError(Exception):
    """What was to say how long an import takes says something else."""


_FAILURES = (
    FileNotFoundError,
    SlowImportError,
    UnreadableImportTimeError,
    subprocess.CalledProcessError,
)
"""What a variant may fail with; the others are still tested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportLimit:
    """What an import may take.

    Attributes:
        module: The module imported.
        before: What is imported already, and does not count.
        seconds: Processor seconds, the least of a few starts with bytecode.
    """

    module: str
    before: tuple[str, ...] = ()
    seconds: float


IMPORT_LIMITS = {
    "gt-config": ImportLimit(module="gt_config", seconds=0.05),
    "gt-pipeline": ImportLimit(module="gt_pipeline.split", before=("torch",), seconds=0.1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A package as one kind of user installs it.

    Attributes:
        package: Its name, for example `gt-pipeline`.
        extra: The extra asked for, None for none.
    """

    package: str
    extra: str | None = None

    @property
    def extras(self) -> tuple[str, ...]:
        """The extras asked for."""
        return () if self.extra is None else (self.extra,)

    def __str__(self) -> str:
        return self.package if self.extra is None else f"{self.package}[{self.extra}]"


def variants_of(workspace: Workspace, names: Iterable[str]) -> list[Variant]:
    """Each package without its extras, then with each one of them."""
    return [
        Variant(package=name, extra=extra)
        for name in names
        for extra in (None, *workspace.members[name].extras)
    ]


def smoke_test(
    workspace: Workspace, variant: Variant, *, dist: Path, scratch: Path, uv: str
) -> None:
    """Installs the wheel of `variant` into a fresh environment and runs its tests there.

    Args:
        workspace: The workspace that the wheels were built from.
        variant: The package, with an extra or without.
        dist: Folder with the built wheels.
        scratch: Folder for environments and copied tests; the one of this variant is replaced.
        uv: The uv executable.

    Raises:
        FileNotFoundError: If a wheel is missing.
        subprocess.CalledProcessError: If installation, an import or a test fails.
        SlowImportError: If an import takes longer than it may.
        UnreadableImportTimeError: If it cannot be told how long one takes.
    """
    name = variant.package
    siblings = workspace.declared_siblings(name, extras=variant.extras)
    wheels = [_wheel(workspace, sibling, dist=dist) for sibling in siblings]
    itself = f"{variant} @ {_wheel(workspace, name, dist=dist).as_uri()}"
    room = _room(scratch, variant)
    shutil.rmtree(room, ignore_errors=True)
    room.mkdir(parents=True)
    shutil.copytree(workspace.members[name].path / "tests", room / "tests")
    # What a source distribution has beside `tests`: a README's example is tested too.
    shutil.copy(workspace.members[name].path / "README.md", room)
    defaults = room / "defaults.txt"
    defaults.write_text("".join(f"{pin}\n" for pin in workspace.group("defaults")))

    python = str(room / "venv" / "bin" / "python")
    root_pyproject = workspace.root / "pyproject.toml"
    _run(uv, "venv", "--quiet", "--python", sys.executable, "venv", room=room)
    install = (uv, "pip", "install", "--quiet", "--python", python, "--constraints", str(defaults))
    _run(*install, "--group", f"{root_pyproject}:test", itself, *map(str, wheels), room=room)
    unwanted = [
        member.module
        for member in workspace.members.values()
        if member.name not in (name, *siblings)
    ]
    _run(python, "-c", _IMPORT_CHECK, workspace.members[name].module, *unwanted, room=room)
    if (limit := IMPORT_LIMITS.get(name)) is not None:
        _check_import(python, limit, room=room)
    pytest = (python, "-m", "pytest", "-q", "-c", str(root_pyproject), "--rootdir", str(room))
    _run(*pytest, "-p", "no:cacheprovider", "-m", "not slow", "tests", room=room)


def main() -> int:
    """Runs the smoke test of the named packages, of all by default; goes on after a failure."""
    root = Path(__file__).resolve().parents[1]
    workspace = load_workspace(root)
    parser = argparse.ArgumentParser(description="test each wheel in a fresh environment")
    parser.add_argument("packages", nargs="*", help="package names (default: all)")
    parser.add_argument("--dist", type=Path, default=root / "dist")
    parser.add_argument("--scratch", type=Path, default=root / ".smoke")
    parser.add_argument("--uv", default="uv", help="the uv executable")
    arguments = parser.parse_args()
    names = arguments.packages or list(workspace.members)
    unknown = sorted(set(names) - set(workspace.members))
    if unknown:
        parser.error(f"unknown packages {unknown}; known: {sorted(workspace.members)}")

    variants = variants_of(workspace, names)
    failures = []
    for variant in variants:
        siblings = workspace.declared_siblings(variant.package, extras=variant.extras)
        print(f"smoke: {variant} with {', '.join(siblings) or 'no siblings'}", flush=True)
        try:
            smoke_test(
                workspace,
                variant,
                dist=arguments.dist.resolve(),
                scratch=arguments.scratch.resolve(),
                uv=_executable(arguments.uv),
            )
        except _FAILURES as error:
            print(f"smoke: {variant} FAILED: {error}", file=sys.stderr, flush=True)
            failures.append(variant)
        else:
            # An environment with torch is several gigabytes; a failed one is kept to look at.
            shutil.rmtree(_room(arguments.scratch, variant))
    passed = len(variants) - len(failures)
    print(f"smoke: {passed} of {len(variants)} installations pass their own tests")
    return 1 if failures else 0


def _room(scratch: Path, variant: Variant) -> Path:
    return scratch / "-".join((variant.package, *variant.extras))


def _wheel(workspace: Workspace, name: str, *, dist: Path) -> Path:
    member = workspace.members[name]
    wheel = dist / f"{member.module}-{member.version}-py3-none-any.whl"
    if not wheel.is_file():
        raise FileNotFoundError(f"{wheel} does not exist; run `make build` first")
    return wheel


def _executable(command: str) -> str:
    found = shutil.which(command)
    if found is None:
        raise FileNotFoundError(f"no executable {command!r}; give --uv")
    return str(Path(found).absolute())


def _check_import(python: str, limit: ImportLimit, *, room: Path) -> None:
    command = (python, "-c", _IMPORT_TIME, limit.module, *limit.before)
    # The first start writes bytecode.
    seconds = min(
        _seconds(_run(*command, room=room, read=True), limit.module) for _ in range(_STARTS)
    )
    beside = "".join(f" after {name}" for name in limit.before)
    print(f"import {limit.module}{beside}: {seconds * 1000:.0f} ms of processor time", flush=True)
    if seconds > limit.seconds:
        raise SlowImportError(
            f"importing {limit.module}{beside} takes {seconds * 1000:.0f} ms of processor time, "
            f"and {limit.seconds * 1000:.0f} are allowed"
        )


def _seconds(output: str, module: str) -> float:
    """The number in the last line; an import may print what it likes before."""
    last = "".join(output.splitlines()[-1:])
    try:
        return float(last)
    except ValueError:
        raise UnreadableImportTimeError(
            f"importing {module} should end with its processor seconds, and ends with {last!r}"
        ) from None


def _run(*command: str, room: Path, read: bool = False) -> str:
    # PYTHONPATH would let the source tree back in; the room is outside the workspace's members,
    # so uv's workspace sources play no part.
    unwanted = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    environment = {key: value for key, value in os.environ.items() if key not in unwanted}
    environment["OMP_NUM_THREADS"] = "1"
    pipe = subprocess.PIPE if read else None
    done = subprocess.run(command, cwd=room, check=True, env=environment, stdout=pipe, text=True)
    return done.stdout or ""


if __name__ == "__main__":
    raise SystemExit(main())
