"""MkDocs hook: pages of the repository that live outside docs/ become pages of the site, and links to them follow."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/RESULTS.md": "results.md",
    "README.md": "index.md",
}
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        if page != "index.md":
            files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    source = {there: here for here, there in PAGES.items() if there != "index.md"}.get(page.file.src_uri)
    home = (ROOT / (source or f"docs/{page.file.src_uri}")).parent
    return LINK.sub(lambda found: found[1] + target(found[2], home) + found[3], markdown)


def target(link: str, home: Path) -> str:
    """A link as the site has it: relative to docs/, or to the page that a file outside of it became."""
    if "://" in link:
        return link
    path = (home / link).resolve()
    if not path.is_relative_to(ROOT):
        return link
    inside = path.relative_to(ROOT).as_posix()
    return PAGES.get(inside, inside.removeprefix("docs/"))
