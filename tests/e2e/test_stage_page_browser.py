"""The stages page in a real browser: a click follows a node through seven columns, and the search finds."""

from __future__ import annotations

import pytest
from browser import chromium, open_page

from graft.workbench.report.stage_page import write_stage_page
from graft.workbench.stages.saved import save_story
from stage_stories import step

pytest_plugins = ["report_pages"]  # the browser
pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium here: apt-get install chromium")
MARKED = "[...document.querySelectorAll('.column')].map((one) => one.querySelectorAll('.marked').length)"


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stages")
    save_story(step(), folder / "story")
    write_stage_page(folder / "story", folder / "page.html")
    return folder / "page.html"


def item(page, column, text):
    """The selector of the first item of a column with the text."""
    items = f"[...document.querySelectorAll('[data-column=\"{column}\"] .item')]"
    return f"[data-item='{page.evaluate(f'{items}.find((one) => one.innerText.includes({text!r})).dataset.item')}']"


def test_a_click_marks_everything_before_and_after(page, stages):
    open_page(page, stages)
    page.click(item(page, 1, "silu"))
    assert page.evaluate(MARKED)[:5] == [1, 4, 4, 1, 1]
    told = page.evaluate("document.getElementById('followed').textContent")
    assert told.startswith("%h: stage_programs.py:") and "→ cpp_fused" in told
    page.click(item(page, 5, "extern_kernels.mm"))
    assert page.evaluate(MARKED)[:5] == [1, 1, 1, 1, 1]
    page.press("Escape")
    assert sum(page.evaluate(MARKED)) == 0 and page.evaluate("document.getElementById('shown').hidden")
    assert page.problems == [] and page.requests == [stages.as_uri()]


def test_a_kernel_shows_its_source(page, stages):
    open_page(page, stages)
    page.click(item(page, 5, "cpp_fused"))
    assert "cpp_prefix.h" in page.evaluate("document.getElementById('shown-code').innerText")


def test_the_search_finds_over_all_columns(page, stages):
    open_page(page, stages)
    page.press("/")
    page.type("aten.exp")
    visible = "[...document.querySelectorAll('.item:not(.away)')].map((one) => one.querySelector('b').textContent)"
    assert page.evaluate(visible) == ["%exp", "%exp"]
    page.press("Enter")
    assert page.evaluate(MARKED)[4] == 1
    page.evaluate("document.getElementById('search').focus()")
    page.press("Escape")
    assert len(page.evaluate(visible)) > 20
    assert page.problems == []
