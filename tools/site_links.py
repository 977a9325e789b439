"""Where the links of a page of the repository lead to on the site.

Pages link to each other as files of the repository do, so that they can be read there. On the site,
``docs/`` is the root, everything else keeps its path, a program may have a page of its name, and
what is no page (a source, a folder without a README) has nothing to link to: its text stays. What
is nowhere is refused.

READMEs of packages are shown by package registries too, where a relative link leads nowhere. Their
links are addresses below ``REPOSITORY``, and are read here as links to the files there.
"""

import posixpath
import re
from collections.abc import Collection
from pathlib import Path

ROOT_README = "README.md"
"""Its place on the site is that of the first page."""

REPOSITORY = "https://github.com/graph-trainer/graph-trainer/blob/main/"
"""Address of the repository's files. Change it here and in the packages' READMEs together."""

_FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[(?P<text>[^\]\[]*(?:\[[^\]]*\][^\]\[]*)*)\]\((?P<target>[^)\s]+)\)")


def site_path(repository_path: str) -> str:
    """The path on the site of a page with that path in the repository."""
    if repository_path == ROOT_README:
        return "index.md"
    return repository_path.removeprefix("docs/")


def repository_path(on_site: str, pages: Collection[str]) -> str:
    """The path in the repository of a page of the site; ``pages`` are those outside ``docs/``."""
    return on_site if on_site in pages else f"docs/{on_site}"


def relative_links(markdown: str) -> list[str]:
    """Return the targets of a page's links to other files that are no addresses."""
    text = _FENCE.sub("", markdown)
    targets = [match["target"] for match in _LINK.finditer(text)]
    return [each for each in targets if not re.match(r"#|[a-z]+:", each)]


class BrokenLinkError(Exception):
    """A page links to what is not in the repository."""


def with_site_links(markdown: str, *, source: str, site_pages: Collection[str], root: Path) -> str:
    """The text of a page with its links as they lead on the site.

    Args:
        markdown: the text, with relative links between files of the repository.
        source: path of the page in the repository.
        site_pages: paths on the site of all pages.
        root: folder of the repository.

    Raises:
        BrokenLinkError: A link leads to no file and no folder.
    """

    def replaced(match: re.Match[str]) -> str:
        text, target = match["text"], match["target"]
        path, _, anchor = target.partition("#")
        if path.startswith(REPOSITORY):
            wanted = path.removeprefix(REPOSITORY)
        elif not path or re.match(r"[a-z]+:", path):
            return match[0]
        else:
            wanted = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if not (root / wanted).exists():
            raise BrokenLinkError(f"{source} links to {target}, but there is no {wanted}")
        for each in (wanted, f"{wanted}/README.md", f"{wanted}.md"):
            page = site_path(each)
            if page in site_pages:
                folder = posixpath.dirname(site_path(source))
                link = posixpath.relpath(page, folder or ".")
                return f"[{text}]({link}{'#' * bool(anchor)}{anchor})"
        return text

    pieces: list[str] = []
    start = 0
    for fence in _FENCE.finditer(markdown):  # what looks like a link in a program is none
        pieces += [_LINK.sub(replaced, markdown[start : fence.start()]), fence[0]]
        start = fence.end()
    return "".join([*pieces, _LINK.sub(replaced, markdown[start:])])
