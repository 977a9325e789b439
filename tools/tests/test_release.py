import datetime
import subprocess
from pathlib import Path

import pytest

import release
from workspace import load_workspace

DAY = datetime.date(2026, 1, 2)


def load(root: Path):
    return load_workspace(root, tracked=())


def changelog(root: Path, package: str, text: str) -> Path:
    path = root / "packages" / package / "CHANGELOG.md"
    path.write_text(text)
    return path


def unreleased(root: Path) -> None:
    changelog(
        root,
        "gt-low",
        "# Changelog\n\n## 0.2.0 (unreleased)\n\n- New.\n\n## 0.1.0 (2025-01-01)\n\n- Old.\n",
    )
    changelog(root, "gt-high", "# Changelog\n\n## 0.1.0 (unreleased)\n\n- First.\n")


def test_what_is_unreleased_is_released_with_its_notes_and_siblings_come_first(root):
    unreleased(root)
    releases = release.releases_of(load(root), has_changed=lambda member, tag: True)
    assert [(each.tag, each.notes) for each in releases] == [
        ("gt-low-0.2.0", "- New."),
        ("gt-high-0.1.0", "- First."),
    ]
    assert release.notes_of(releases) == (
        "## gt-low 0.2.0\n\n- New.\n\n## gt-high 0.1.0\n\n- First."
    )


def test_a_package_that_did_not_change_is_left_alone(root):
    unreleased(root)
    changelog(root, "gt-high", "# Changelog\n\n## 0.1.0 (2025-01-01)\n\n- First.\n")
    releases = release.releases_of(load(root), has_changed=lambda member, tag: False)
    assert [each.package for each in releases] == ["gt-low"]


def test_every_reason_against_a_release_is_named(root):
    changelog(
        root, "gt-low", "# Changelog\n\n## 0.2.0 (unreleased)\n\n## 0.1.0 (2025-01-01)\n\n- Old.\n"
    )
    changelog(root, "gt-high", "# Changelog\n\n## 0.1.0 (2025-01-01)\n\n- First.\n")
    with pytest.raises(release.ReleaseRefusedError) as refused:
        release.releases_of(load(root), has_changed=lambda member, tag: True)
    assert sorted(str(refused.value).splitlines()) == [
        (
            "gt-high changed since the tag gt-high-0.1.0, or git has none, and its CHANGELOG.md does "
            "not say what: begin it with a new version `(unreleased)`"
        ),
        "gt-low: its CHANGELOG.md says nothing of 0.2.0",
    ]


def test_a_changelog_without_versions_is_refused(root):
    unreleased(root)
    changelog(root, "gt-low", "# Changelog\n")
    with pytest.raises(
        release.ReleaseRefusedError,
        match=r"^gt-low: its CHANGELOG.md has no heading `## 1.2.3 \(date\)`$",
    ):
        release.releases_of(load(root), has_changed=lambda member, tag: True)


def test_only_the_newest_heading_is_dated():
    text = "# C (unreleased)\n\n## 0.2.0 (unreleased)\n\n- A.\n\n## 0.1.0 (2025-01-01)\n"
    assert release.with_date(text, DAY) == (
        "# C (unreleased)\n\n## 0.2.0 (2026-01-02)\n\n- A.\n\n## 0.1.0 (2025-01-01)\n"
    )


@pytest.fixture
def repository(root, monkeypatch):
    """The workspace as a git repository, with a `uv` that builds nothing."""
    unreleased(root)
    (root / "tools").mkdir()
    (root / "uv").write_text("#!/bin/sh\nmkdir -p dist\n")
    (root / "uv").chmod(0o755)
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "Somebody")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "somebody@example.org")
    monkeypatch.setattr(release, "_today", lambda: DAY)
    return root


def released(root: Path, *, smoke: str) -> None:
    (root / "tools" / "smoke.py").write_text(smoke)
    for command in (("init", "--quiet"), ("add", "."), ("commit", "--quiet", "-m", "All")):
        subprocess.run(("git", *command), cwd=root, check=True)
    workspace = load(root)
    releases = release.releases_of(workspace, has_changed=lambda member, tag: True)
    release._release(workspace, releases, uv=str(root / "uv"))


def git(root: Path, *arguments: str) -> list[str]:
    return subprocess.run(
        ("git", *arguments), cwd=root, check=True, capture_output=True, text=True
    ).stdout.splitlines()


def test_a_release_is_dated_committed_and_tagged(repository):
    (repository / "dist").mkdir()
    (repository / "dist" / "older.whl").touch()
    released(repository, smoke="")
    assert not (repository / "dist" / "older.whl").exists()
    assert git(repository, "tag") == ["gt-high-0.1.0", "gt-low-0.2.0"]
    assert git(repository, "log", "-1", "--format=%s") == ["Release gt-low 0.2.0, gt-high 0.1.0"]
    assert (
        git(repository, "show", "HEAD:packages/gt-low/CHANGELOG.md")[2] == "## 0.2.0 (2026-01-02)"
    )
    assert (repository / "dist" / "NOTES.md").read_text().startswith("## gt-low 0.2.0\n")
    low = load(repository).members["gt-low"]
    assert not release._has_changed(low, "gt-low-0.2.0")
    (low.path / "src" / "gt_low" / "new.py").touch()
    subprocess.run(("git", "add", "."), cwd=repository, check=True)
    assert release._has_changed(low, "gt-low-0.2.0")
    assert release._has_changed(low, "gt-low-9.9.9")


def test_a_wheel_that_fails_leaves_everything_as_it_was(repository):
    with pytest.raises(subprocess.CalledProcessError):
        released(repository, smoke="raise SystemExit(1)")
    assert git(repository, "status", "--porcelain", "--", "packages") == []
    assert git(repository, "tag") == []
    assert git(repository, "log", "-1", "--format=%s") == ["All"]
