"""`make smoke`: each wheel, with its declared siblings only, passes its own tests.

For every package a fresh environment gets that wheel, the wheels of the siblings it declares
(directly or through one another), their third-party dependencies at the workspace's default
versions, and the test tools: nothing else of ours, no source tree. The tests are copied out of the
repository, so that nothing imports from `src/`. What this catches and `make test` cannot: an
undeclared dependency, a file missing from the wheel, a test that leans on another package.
"""

import argparse
import os
import shutil
import subprocess
import sys
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


def smoke_test(workspace: Workspace, name: str, *, dist: Path, scratch: Path, uv: str) -> None:
    """Installs the wheel of `name` into a fresh environment and runs its tests there.

    Args:
        workspace: The workspace that the wheels were built from.
        name: The package, for example `gt-trace`.
        dist: Folder with the built wheels.
        scratch: Folder for environments and copied tests; `scratch/name` is replaced.
        uv: The uv executable.

    Raises:
        FileNotFoundError: If a wheel is missing.
        subprocess.CalledProcessError: If installation, an import or a test fails.
    """
    siblings = workspace.declared_siblings(name)
    wheels = [_wheel(workspace, package, dist=dist) for package in (name, *siblings)]
    room = scratch / name
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
    _run(*install, "--group", f"{root_pyproject}:test", *map(str, wheels), room=room)
    unwanted = [
        member.module
        for member in workspace.members.values()
        if member.name not in (name, *siblings)
    ]
    _run(python, "-c", _IMPORT_CHECK, workspace.members[name].module, *unwanted, room=room)
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

    failures = []
    for name in names:
        siblings = ", ".join(workspace.declared_siblings(name)) or "no siblings"
        print(f"smoke: {name} with {siblings}", flush=True)
        try:
            smoke_test(
                workspace,
                name,
                dist=arguments.dist.resolve(),
                scratch=arguments.scratch.resolve(),
                uv=_executable(arguments.uv),
            )
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            print(f"smoke: {name} FAILED: {error}", file=sys.stderr, flush=True)
            failures.append(name)
        else:
            # An environment with torch is several gigabytes; a failed one is kept to look at.
            shutil.rmtree(arguments.scratch / name)
    print(f"smoke: {len(names) - len(failures)} of {len(names)} wheels pass their own tests")
    return 1 if failures else 0


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


def _run(*command: str, room: Path) -> None:
    # PYTHONPATH would let the source tree back in; the room is outside the workspace's members,
    # so uv's workspace sources play no part.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment["OMP_NUM_THREADS"] = "1"
    subprocess.run(command, cwd=room, check=True, env=environment)


if __name__ == "__main__":
    raise SystemExit(main())
