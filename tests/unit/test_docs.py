"""The documentation's own tools: broken links are found, and pictures are what their script draws."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import graft
from graft import testing

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs" / "site"


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(SITE))
    import check_links

    return check_links


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("# A\n\n[page](docs/page.md#two-words) ![x](docs/x.svg)\n")
    (tmp_path / "docs" / "page.md").write_text(
        "# Page\n\n## Two `words`\n\n[up](../README.md)\n\n```\n[no](link.md)\n```\n"
    )
    (tmp_path / "docs" / "x.svg").write_text("<svg/>")
    (tmp_path / "mkdocs.yml").write_text("site_name: x\nnav:\n  - Page: page.md\n")
    return tmp_path


def test_no_link_of_the_documentation_is_broken(tool):
    assert tool.problems(ROOT) == []


def test_a_sound_tree_has_no_problems(tool, tree):
    assert tool.problems(tree) == []


@pytest.mark.parametrize(
    ("page", "text", "problem"),
    [
        ("README.md", "[a](docs/none.md)", "README.md: docs/none.md: there is no such file"),
        ("README.md", "![a](docs/none.svg)", "README.md: docs/none.svg: there is no such file"),
        ("README.md", '<img alt="a" src="docs/none.svg">', "README.md: docs/none.svg: there is no such file"),
        ("docs/page.md", "[a](#three)", "docs/page.md: #three: page.md has no such heading"),
        ("README.md", "[a](docs/page.md#one)", "README.md: docs/page.md#one: page.md has no such heading"),
        ("docs/new.md", "# New", "docs/new.md: not in the nav of mkdocs.yml"),
    ],
)
def test_each_kind_of_broken_link_is_found(tool, tree, page, text, problem):
    (tree / page).write_text(text)
    assert problem in tool.problems(tree)


WORDS = st.lists(st.sampled_from(["Load", "`ir/`", "KV", "cache:", "two-way", "why?"]), min_size=1, max_size=4)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(headings=st.lists(WORDS, min_size=1, max_size=5), wanted=WORDS)
def test_an_anchor_is_broken_where_no_heading_has_it(tool, tree, headings, wanted):
    slug = "-".join(re.sub(r"[`/:?]", "", word).lower() for word in wanted)
    lines = ["## " + " ".join(words) for words in headings]
    (tree / "docs" / "page.md").write_text("\n\n".join([*lines, "## Two words", f"[a](#{slug})"]))
    broken = [f"docs/page.md: #{slug}: page.md has no such heading"]
    assert tool.problems(tree) == ([] if wanted in headings else broken)


def test_source_files_that_the_text_names_are_looked_for(tool, tree):
    (tree / "docs" / "page.md").write_text("## Two words\n`ir/edit.py` and (ir/gone.py)")
    (tree / "src" / "graft" / "ir").mkdir(parents=True)
    (tree / "src" / "graft" / "ir" / "edit.py").write_text("")
    assert tool.problems(tree, paths=True) == ["docs/page.md: ir/gone.py: there is no such file"]


def test_the_pictures_are_what_their_script_draws():
    drawn = "import pictures, json; print(json.dumps({n: d().svg() for n, d in pictures.PICTURES.items()}))"
    done = subprocess.run([sys.executable, "-c", drawn], cwd=SITE, capture_output=True, text=True, check=True)
    stored = {path.stem: path.read_text() for path in (ROOT / "docs" / "pictures").glob("*.svg")}
    assert json.loads(done.stdout) == stored, "run: python docs/site/pictures.py"


def test_the_reference_has_every_public_name_and_no_other():
    """Pages are generated without importing anything, so a name that is gone would be found by `make docs` alone."""
    named = re.findall(r"^::: (\S+)", (ROOT / "docs" / "api.md").read_text(), re.M)
    public = [f"graft.{name}" for name in graft.__all__] + [f"graft.testing.{name}" for name in testing.__all__]
    assert sorted(named) == sorted(public)
