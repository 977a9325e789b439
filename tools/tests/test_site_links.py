"""Links of a page lead to pages of the site, or stay text."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from site_links import REPOSITORY, BrokenLinkError, repository_path, site_path, with_site_links

ROOT = Path(__file__).resolve().parents[2]

PAGES = {
    "architecture.md",
    "decisions/0005-buckets.md",
    "examples/b.py.md",
    "index.md",
    "packages/gt-trace/README.md",
    "packages/gt-passes/README.md",
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name in (
        "README.md",
        "docs/decisions/0005-buckets.md",
        "docs/architecture.md",
        "examples/a.py",
        "examples/b.py",
        "tools/a.py",
        "packages/gt-trace/README.md",
        "packages/gt-passes/README.md",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path


def linked(markdown: str, source: str, root: Path) -> str:
    return with_site_links(markdown, source=source, site_pages=PAGES, root=root)


@pytest.mark.parametrize(
    ("source", "link", "expected"),
    [
        ("packages/gt-trace/README.md", "../../docs/decisions/0005-buckets.md#why", "../../decisions/0005-buckets.md#why"),
        ("packages/gt-trace/README.md", "../gt-passes/README.md", "../gt-passes/README.md"),
        ("packages/gt-trace/README.md", "../../README.md", "../../index.md"),
        ("docs/architecture.md", "decisions/0005-buckets.md", "decisions/0005-buckets.md"),
        ("docs/architecture.md", "../packages/gt-trace", "packages/gt-trace/README.md"),
        ("docs/decisions/0005-buckets.md", "../../packages/gt-trace/", "../packages/gt-trace/README.md"),
        ("docs/architecture.md", "../examples/b.py", "examples/b.py.md"),
        ("docs/architecture.md", "#here", "#here"),
        ("packages/gt-trace/README.md", f"{REPOSITORY}docs/architecture.md#why", "../../architecture.md#why"),
        ("docs/architecture.md", "https://example.org/a.md", "https://example.org/a.md"),
    ],
)  # fmt: skip
def test_a_link_to_a_page_leads_there(source: str, link: str, expected: str, repository: Path):
    assert linked(f"See [that]({link}).", source, repository) == f"See [that]({expected})."


def test_what_is_no_page_is_text(repository: Path):
    text = "Run [`a.py`](../examples/a.py), [b](../tools) and [c](architecture.md)."
    expected = "Run `a.py`, b and [c](architecture.md)."
    assert linked(text, "docs/architecture.md", repository) == expected


def test_programs_are_left_alone(repository: Path):
    program = "```python\nx = table[0](../nothing)\n```\n[a](../tools)\n~~~\n[b](../nothing)\n~~~"
    assert linked(program, "docs/architecture.md", repository) == program.replace(
        "[a](../tools)", "a"
    )


def test_what_is_nowhere_is_refused(repository: Path):
    with pytest.raises(
        BrokenLinkError, match=r"^docs/architecture.md links to b.md#c, but there is no docs/b.md$"
    ):
        linked("[a](b.md#c)", "docs/architecture.md", repository)


def test_every_link_of_every_page_leads_somewhere():
    listed = subprocess.run(
        ("git", "ls-files", "*.md"), cwd=ROOT, check=True, capture_output=True, text=True
    )
    pages = [page for page in listed.stdout.splitlines() if (ROOT / page).is_file()]
    assert len(pages) > 50
    for page in pages:
        linked((ROOT / page).read_text(encoding="utf-8"), page, ROOT)


def test_paths_lead_there_and_back():
    assert site_path("docs/decisions/0005-buckets.md") == "decisions/0005-buckets.md"
    assert repository_path("decisions/0005-buckets.md", ()) == "docs/decisions/0005-buckets.md"
    outside = "packages/gt-trace/README.md"
    assert repository_path(site_path(outside), {outside}) == outside
