"""`make release`: dates the changelogs of the packages that changed, builds, smokes and tags them.

A package is released if its changelog begins with a version that is `(unreleased)`. One that
changed since the tag of its last version, and whose changelog does not say what, is refused. The
wheels pass `smoke.py` before anything is committed; where they do not, the changelogs are as they
were. Nothing is published: the commands that do so are printed.
"""

import argparse
import datetime
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from workspace import Member, Workspace, load_workspace

_HEADING = re.compile(r"^## (?P<version>\S+) \((?P<date>[^)]*)\)$", re.MULTILINE)
_UNRELEASED = "unreleased"


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A version of a package that is about to be released.

    Attributes:
        package: Its name.
        version: Of its pyproject.toml and of its changelog's newest heading.
        notes: What the changelog says of it.
    """

    package: str
    version: str
    notes: str

    @property
    def tag(self) -> str:
        """What git will know it by."""
        return f"{self.package}-{self.version}"


class ReleaseRefusedError(Exception):
    """What is to be released is not ready; the text names every reason."""


def releases_of(
    workspace: Workspace, *, has_changed: Callable[[Member, str], bool]
) -> list[Release]:
    """What there is to release, those that others depend on first.

    Args:
        workspace: The workspace.
        has_changed: Whether the sources of a package differ from those of a tag.

    Raises:
        ReleaseRefusedError: A changelog says nothing of a version, or of a change.
    """
    releases, reasons = [], []
    for member in workspace.members.values():
        text = _changelog(member).read_text(encoding="utf-8")
        headings = list(_HEADING.finditer(text))
        if not headings:
            reasons.append(f"{member.name}: its CHANGELOG.md has no heading `## 1.2.3 (date)`")
            continue
        newest = headings[0]
        end = headings[1].start() if len(headings) > 1 else len(text)
        release = Release(
            package=member.name,
            version=newest["version"],
            notes=text[newest.end() : end].strip(),
        )
        if newest["date"] != _UNRELEASED:
            if has_changed(member, release.tag):
                reasons.append(
                    f"{member.name} changed since the tag {release.tag}, or git has none, and its "
                    f"CHANGELOG.md does not say what: begin it with a new version `({_UNRELEASED})`"
                )
        elif not release.notes:
            reasons.append(f"{member.name}: its CHANGELOG.md says nothing of {release.version}")
        else:
            releases.append(release)
    if reasons:
        raise ReleaseRefusedError("\n".join(reasons))
    return sorted(releases, key=lambda each: len(workspace.declared_siblings(each.package)))


def with_date(changelog: str, date: datetime.date) -> str:
    """Return a changelog whose newest version is released on a day."""
    return _HEADING.sub(rf"## \g<version> ({date.isoformat()})", changelog, count=1)


def notes_of(releases: Iterable[Release]) -> str:
    """Return what changed, in Markdown: a section for each package."""
    return "\n\n".join(f"## {each.package} {each.version}\n\n{each.notes}" for each in releases)


def main() -> int:
    """Releases what is unreleased; `--dry-run` only says what that is."""
    parser = argparse.ArgumentParser(description="date, build, smoke and tag what changed")
    parser.add_argument("--dry-run", action="store_true", help="only print what would be released")
    parser.add_argument("--uv", default="uv", help="the uv executable")
    arguments = parser.parse_args()
    root = Path(__file__).resolve().parents[1]
    workspace = load_workspace(root)
    try:
        if not arguments.dry_run and (changes := _git(root, "status", "--porcelain")):
            raise ReleaseRefusedError(f"commit or stash first:\n{changes}")
        releases = releases_of(workspace, has_changed=_has_changed)
    except ReleaseRefusedError as error:
        print(error, file=sys.stderr)
        return 1
    print(notes_of(releases) or "nothing is unreleased")
    if arguments.dry_run or not releases:
        return 0
    _release(workspace, releases, uv=arguments.uv)
    print("\nPublish with:")
    for each in releases:
        module = workspace.members[each.package].module
        print(f"  uv publish dist/{module}-{each.version}*")
    print(f"  git push origin HEAD {' '.join(each.tag for each in releases)}")
    return 0


def _release(workspace: Workspace, releases: list[Release], *, uv: str) -> None:
    """Dates, builds, tests, commits and tags; puts the changelogs back if that fails.

    Raises:
        subprocess.CalledProcessError: A build, a wheel's test, or git failed.
    """
    root = workspace.root
    paths = [_changelog(workspace.members[each.package]) for each in releases]
    before = [path.read_text(encoding="utf-8") for path in paths]
    names = [each.package for each in releases]
    try:
        for path, text in zip(paths, before, strict=True):
            path.write_text(with_date(text, _today()), encoding="utf-8")
        shutil.rmtree(root / "dist", ignore_errors=True)
        subprocess.run(
            (uv, "build", "--quiet", "--all-packages", "--out-dir", "dist"), cwd=root, check=True
        )
        smoke = (sys.executable, "tools/smoke.py", "--uv", uv, *names)
        subprocess.run(smoke, cwd=root, check=True)
        (root / "dist" / "NOTES.md").write_text(notes_of(releases) + "\n", encoding="utf-8")
        title = "Release " + ", ".join(f"{each.package} {each.version}" for each in releases)
        _git(root, "commit", "--quiet", "--message", title, "--", *map(str, paths))
    except BaseException:
        for path, text in zip(paths, before, strict=True):
            path.write_text(text, encoding="utf-8")
        raise
    for each in releases:
        _git(root, "tag", "--annotate", each.tag, "--message", f"{each.package} {each.version}")


def _today() -> datetime.date:
    return datetime.datetime.now(tz=datetime.UTC).date()


def _changelog(member: Member) -> Path:
    return member.path / "CHANGELOG.md"


def _has_changed(member: Member, tag: str) -> bool:
    """Whether a package's sources differ from a tag's; also if there is no such tag."""
    known = _git(member.path, "tag", "--list", tag)
    return not known or bool(
        _git(member.path, "diff", "--name-only", tag, "--", "src", "pyproject.toml")
    )


def _git(folder: Path, *arguments: str) -> str:
    command = ("git", *arguments)
    return subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main())
