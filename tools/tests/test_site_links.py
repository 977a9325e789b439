"""Links of a page lead to pages of the site, or stay text."""

from __future__ import annotations

import pytest

from site_links import repository_path, site_path, with_site_links

PAGES = {
    "architecture.md",
    "decisions/0005-buckets.md",
    "index.md",
    "packages/gt-trace/README.md",
    "packages/gt-passes/README.md",
}


def linked(markdown: str, source: str) -> str:
    return with_site_links(markdown, source=source, site_pages=PAGES)


@pytest.mark.parametrize(
    ("source", "link", "expected"),
    [
        ("packages/gt-trace/README.md", "../../docs/decisions/0005-buckets.md#why", "../../decisions/0005-buckets.md#why"),
        ("packages/gt-trace/README.md", "../gt-passes/README.md", "../gt-passes/README.md"),
        ("packages/gt-trace/README.md", "../../README.md", "../../index.md"),
        ("docs/architecture.md", "decisions/0005-buckets.md", "decisions/0005-buckets.md"),
        ("docs/architecture.md", "../packages/gt-trace", "packages/gt-trace/README.md"),
        ("docs/decisions/0005-buckets.md", "../../packages/gt-trace/", "../packages/gt-trace/README.md"),
        ("docs/architecture.md", "#here", "#here"),
        ("docs/architecture.md", "https://example.org/a.md", "https://example.org/a.md"),
    ],
)  # fmt: skip
def test_a_link_to_a_page_leads_there(source: str, link: str, expected: str):
    assert linked(f"See [that]({link}).", source) == f"See [that]({expected})."


def test_what_is_no_page_is_text():
    text = "Run [`a.py`](../examples/a.py), [b](../tools) and [c](architecture.md)."
    expected = "Run `a.py`, b and [c](architecture.md)."
    assert linked(text, "docs/architecture.md") == expected


def test_programs_are_left_alone():
    program = "```python\nx = table[0](../nothing)\n```\n[a](../nothing)\n~~~\n[b](../nothing)\n~~~"
    assert linked(program, "docs/architecture.md") == program.replace("[a](../nothing)", "a")


def test_paths_lead_there_and_back():
    assert site_path("docs/decisions/0005-buckets.md") == "decisions/0005-buckets.md"
    assert repository_path("decisions/0005-buckets.md", ()) == "docs/decisions/0005-buckets.md"
    outside = "packages/gt-trace/README.md"
    assert repository_path(site_path(outside), {outside}) == outside
