"""What mkdocs does not know of this repository: pages beside ``docs/``, and where links lead."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from page_programs import without_marks
from site_links import repository_path, with_site_links

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = (
    "CONTRIBUTING.md",
    "STYLE.md",
    "benchmarks/README.md",
    "examples/README.md",
    "packages/*/*.md",
    "packages/gt-trainer/launch/README.md",
    "tests-integration/README.md",
)
"""Pages that are not in ``docs/``. The root's README is the first page's, in other words."""

PROGRAMS = "examples/*.py"
"""Programs that are pages of the site."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that stand beside what they describe."""
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    for path in sorted(ROOT.glob(PROGRAMS)):
        source = without_marks(path.read_text(encoding="utf-8"))
        page = f"# {path.name}\n\n```python\n{source}```\n"
        name = f"{path.relative_to(ROOT).as_posix()}.md"
        files.append(File.generated(config, name, content=page))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let the links of a page lead to pages of the site."""
    pages = {each.src_uri for each in files.documentation_pages()}
    outside = {each.src_uri for each in files if each.generated_by is not None}
    source = repository_path(page.file.src_uri, outside)
    return with_site_links(markdown, source=source, site_pages=pages, root=ROOT)
