"""What the workspace consists of, read once from its pyproject.toml files.

Shared by the metadata check and the wheel smoke test, so that both mean the same thing by "a
member" and "its declared siblings". Standard library and `packaging` only.
"""

import subprocess
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One package of the workspace.

    Attributes:
        name: Distribution name, for example `gt-trace`.
        path: Its folder.
        pyproject: Its parsed pyproject.toml.
    """

    name: str
    path: Path
    pyproject: Mapping[str, Any]

    @property
    def module(self) -> str:
        """Import name, for example `gt_trace`."""
        return self.name.replace("-", "_")

    @property
    def project(self) -> Mapping[str, Any]:
        """The `[project]` table; empty if there is none."""
        table: Mapping[str, Any] = self.pyproject.get("project", {})
        return table

    @property
    def version(self) -> str:
        """The static version, or an empty string if it is missing."""
        return str(self.project.get("version", ""))

    @property
    def extras(self) -> tuple[str, ...]:
        """Names of the extras it declares, sorted."""
        return tuple(sorted(self.project.get("optional-dependencies", {})))

    def requirements(self, *, extras: Collection[str]) -> tuple[Requirement, ...]:
        """Declared dependencies, with those of the extras named."""
        lines = list(self.project.get("dependencies", ()))
        for name, group in self.project.get("optional-dependencies", {}).items():
            if name in extras:
                lines.extend(group)
        return tuple(Requirement(line) for line in lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """The root folder, its parsed pyproject.toml, its members and the files that git tracks.

    Attributes:
        root: The workspace's root folder.
        pyproject: The root's parsed pyproject.toml.
        members: Every folder of `packages/` that has a pyproject.toml, by name.
        tracked: Paths of the tracked files, relative to `root`, sorted.
    """

    root: Path
    pyproject: Mapping[str, Any]
    members: Mapping[str, Member]
    tracked: tuple[str, ...]

    def group(self, name: str) -> tuple[Requirement, ...]:
        """Requirements that the root's dependency group `name` states itself (no includes)."""
        entries = self.pyproject.get("dependency-groups", {}).get(name, ())
        return tuple(Requirement(entry) for entry in entries if isinstance(entry, str))

    def declared_siblings(self, name: str, *, extras: Collection[str] = ()) -> tuple[str, ...]:
        """Members that `name` with `extras` depends on, directly or through another one, sorted.

        A sibling's extras count where they are asked for, as in `gt-pipeline[graph]`.
        """
        seen = {(name, frozenset(extras))}
        pending = list(seen)
        while pending:
            member, its_extras = pending.pop()
            for requirement in self.members[member].requirements(extras=its_extras):
                sibling = (canonicalize_name(requirement.name), frozenset(requirement.extras))
                if sibling[0] in self.members and sibling not in seen:
                    seen.add(sibling)
                    pending.append(sibling)
        return tuple(sorted({member for member, _ in seen} - {name}))


def load_workspace(root: Path, *, tracked: tuple[str, ...] | None = None) -> Workspace:
    """Reads the workspace at `root`.

    Args:
        root: Folder with the root pyproject.toml.
        tracked: The tracked files, relative to `root`; asked of git if None.

    Raises:
        FileNotFoundError: If `root` has no pyproject.toml.
        subprocess.CalledProcessError: If git is asked and `root` is not in a repository.
    """
    members = {}
    for file in sorted(root.glob("packages/*/pyproject.toml")):
        name = file.parent.name
        members[name] = Member(name=name, path=file.parent, pyproject=_read_toml(file))
    return Workspace(
        root=root,
        pyproject=_read_toml(root / "pyproject.toml"),
        members=members,
        tracked=_tracked_by_git(root) if tracked is None else tracked,
    )


def _read_toml(file: Path) -> Mapping[str, Any]:
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _tracked_by_git(root: Path) -> tuple[str, ...]:
    # A tracked file that is deleted but not yet committed has nothing left to check.
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True
    ).stdout
    return tuple(sorted(path for path in listing.split("\0") if path and (root / path).is_file()))
