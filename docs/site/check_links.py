"""Checks README.md, CONTRIBUTING.md, CHANGELOG.md, AGENTS.md and docs/*.md without building the site: every
relative link has its file, every anchor its heading, and every page of docs/ stands in the navigation of mkdocs.yml.

    python docs/site/check_links.py [--paths]    --paths: source files that the text names exist as well
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
OUTSIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "AGENTS.md")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.M | re.S)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|<img[^>]*\ssrc=\"([^\"]+)\"")
HEADING = re.compile(r"^#+ +(.+?) *$", re.M)
SOURCE = re.compile(r"(?<![\w/.<>*-])((?:\w+/)+\w+\.(?:py|h|cpp|yaml))\b")
# files that the tutorial makes; torch's own, and those of its tests
MADE = re.compile(r"\w+_op/|\w+_fusions/|torch/|DIR/|(dynamo|inductor|functorch|distributed)/test_")
HOMES = ("", "src/graft", "docs", "tests")  # what a path in the text may be relative to


def pages(root: Path) -> list[Path]:
    return [root / name for name in OUTSIDE if (root / name).exists()] + sorted((root / "docs").glob("*.md"))


def anchors(text: str) -> set[str]:
    """Of every heading, as MkDocs writes them (and GitHub, for words with one space between them)."""
    names = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", found) for found in HEADING.findall(FENCE.sub("", text))]
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", name).strip().lower()) for name in names}


def broken_links(page: Path) -> Iterator[str]:
    for found in LINK.finditer(FENCE.sub("", page.read_text())):
        link = found[1] or found[2]
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists():
            yield f"{link}: there is no such file"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text()):
            yield f"{link}: {file.name} has no such heading"


def missing_sources(page: Path, root: Path) -> Iterator[str]:
    for found in SOURCE.finditer(FENCE.sub("", page.read_text())):
        if not MADE.match(found[1]) and not any((root / home / found[1]).exists() for home in HOMES):
            yield f"{found[1]}: there is no such file"


def problems(root: Path, *, paths: bool = False) -> list[str]:
    """One line each, with the page that has it."""
    found = [f"{page.relative_to(root)}: {one}" for page in pages(root) for one in broken_links(page)]
    nav = (root / "mkdocs.yml").read_text().partition("\nnav:")[2]
    listed = set(re.findall(r": ([\w/]+\.md)$", nav, re.M))
    found += [f"docs/{page.name}: not in the nav of mkdocs.yml" for page in sorted((root / "docs").glob("*.md"))
              if page.name not in listed]  # fmt: skip
    if paths:
        found += [f"{page.relative_to(root)}: {one}" for page in pages(root) for one in missing_sources(page, root)]
    return found


if __name__ == "__main__":
    wrong = problems(ROOT, paths="--paths" in sys.argv[1:])
    print("\n".join(wrong) or "links: nothing broken")
    sys.exit(1 if wrong else 0)
