"""The report in a real browser: it opens, says nothing on the console, and does what a click or a key asks."""

from __future__ import annotations

import time

import pytest
from browser import PATIENCE, chromium, open_page, until

from graft.workbench.report import write_report
from report_cases import dump_plain

pytest_plugins = ["report_pages"]  # the reports and the browser
pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium here: apt-get install chromium")


@pytest.mark.exhaustive
def test_a_report_of_32_layers_is_small_and_opens_quietly(page, deep, record_property, capsys):
    seconds, drawn = open_page(page, deep)
    size = deep.stat().st_size / 1e6
    record_property("load_seconds", seconds)
    with capsys.disabled():
        print(f"\nreport of 32 layers: {size:.2f} MB, loaded after {seconds:.2f} s, drawn after {drawn:.2f} s")
    assert page.problems == [] and page.requests == [deep.as_uri()]
    assert size < 5 and drawn < 10  # 2 s is the aim; what was measured stands in docs/report.md
    said = page.evaluate("document.getElementById('said').textContent")
    assert said == "32 layers: 1–31 are equal (× 31), layer 0 differs"
    assert page.evaluate("document.querySelectorAll('#pipeline tbody tr').length") > 15


def test_a_click_on_a_transform_shows_its_diff(page, decoder):
    open_page(page, decoder)
    page.click("#pipeline tbody [data-open=fuse_rms_norm]")
    article = "document.querySelector('#drawer article:not([hidden])')"
    assert page.evaluate(f"{article}.dataset.transform") == "fuse_rms_norm"
    text = page.evaluate(f"{article}.innerText")
    for part in ("Before and after", "layers 0–5 × 6", "%rms_norm_default", "Matches", "Near misses", "13"):
        assert part in text
    box = page.evaluate(f"{article}.querySelector('.canvas').getBoundingClientRect().toJSON()")
    assert box["width"] > 300 and box["height"] > 200
    assert painted(page, f"{article}.querySelector('.canvas')") > 1000
    page.click("#drawer article:not([hidden]) [data-view=after]")
    after = page.evaluate(f"{article}.querySelector('.canvas').getAttribute('aria-label')")
    assert after.endswith("after; as text below")
    page.click("#drawer-close")
    assert page.evaluate("document.getElementById('drawer').hidden")
    assert page.problems == []


def painted(page, element):
    """How many pixels of a drawing are not empty."""
    return page.evaluate(
        f"[...{element}.querySelectorAll('canvas')].reduce((sum, one) => sum + (one.width ? one.getContext('2d')"
        ".getImageData(0, 0, one.width, one.height).data.filter((v, i) => i % 4 === 3 && v).length : 0), 0)"
    )


@pytest.mark.exhaustive
def test_every_transform_and_every_step_can_be_drawn(page, decoder):
    open_page(page, decoder)
    names = page.evaluate("[...document.querySelectorAll('#pipeline tbody tr')].map((row) => row.dataset.transform)")
    page.press("j")
    page.press("Enter")
    for name in names:
        assert page.evaluate("document.querySelector('#drawer article:not([hidden])').dataset.transform") == name
        selects = "document.querySelectorAll('#drawer article:not([hidden]) [data-drawing] option').length"
        for part in range(page.evaluate(selects)):
            page.evaluate(
                "(() => { const s = document.querySelector('#drawer article:not([hidden]) [data-drawing]');"
                f" s.value = '{part}'; s.dispatchEvent(new Event('change')); }})()"
            )
            for way in ("before", "after", "both"):
                page.evaluate(f"document.querySelector('#drawer article:not([hidden]) [data-view={way}]').click()")
        page.evaluate("document.querySelector('#drawer article:not([hidden]) [data-whole]')?.click()")
        page.press("j")
    page.press("Escape")
    assert page.evaluate("document.getElementById('drawer').hidden")
    for step in range(page.evaluate("document.getElementById('step').options.length")):
        page.evaluate(
            f"(() => {{ const s = document.getElementById('step'); s.value = '{step}';"
            " s.dispatchEvent(new Event('change')); })()"
        )
        assert painted(page, "document.getElementById('overview')") > 500
        assert painted(page, "document.getElementById('inside')") > 500
    assert page.problems == []


def test_layers_open_one_at_a_time_and_nodes_do_not_overlap(page, decoder):
    open_page(page, decoder)
    title = "document.getElementById('part-title').textContent"
    assert page.evaluate(title) == "layer 1 · one of 5 equal layers"
    page.press("]")
    assert page.evaluate(title) == "layer 2 · one of 5 equal layers"
    assert "model.layers.2.self_attn" in page.evaluate("document.getElementById('nodes').textContent")
    assert "model.layers.1." not in page.evaluate("document.getElementById('nodes').textContent")
    page.press("[")
    page.press("[")
    assert page.evaluate(title) == "layer 0"
    boxes = page.evaluate(
        "document.querySelector('#inside .canvas')._cyreg.cy.nodes('.body, .chip')"
        ".map((n) => n.boundingBox({includeLabels: false, includeOverlays: false}))"
    )
    assert len(boxes) > 30
    for number, one in enumerate(boxes):
        for other in boxes[:number]:
            apart = one["x2"] <= other["x1"] + 4 or other["x2"] <= one["x1"] + 4
            assert apart or one["y2"] <= other["y1"] + 4 or other["y2"] <= one["y1"] + 4
    assert page.problems == []


def test_a_node_of_the_drawing_can_be_clicked(page, decoder):
    open_page(page, decoder)
    page.scroll_to("#layers", "start")
    at = page.evaluate(
        "(() => { const c = document.querySelector('#inside .canvas'), b = c.getBoundingClientRect();"
        " const p = c._cyreg.cy.nodes('.fused')[0].renderedPosition(); return {x: b.x + p.x, y: b.y + p.y}; })()"
    )
    page.click_at(at["x"], at["y"])
    told = until(page, "!document.getElementById('node').hidden && document.getElementById('node').innerText")
    assert "graft.add_rms_norm" in told and "model.layers.1.input_layernorm" in told and "fuse_add_rms_norm" in told


def test_search_finds_nodes_and_transforms(page, decoder):
    open_page(page, decoder)
    page.press("/")
    page.type("layers.4 self_attn linear")
    hits = page.evaluate("[...document.querySelectorAll('#hits [role=option]')].map((hit) => hit.innerText)")
    assert hits and all("layers.4.self_attn" in hit for hit in hits)
    page.press("Enter")
    assert "layer 4" in page.evaluate("document.getElementById('part-title').textContent")
    assert "model.layers.4.self_attn" in page.evaluate("document.getElementById('node').innerText")
    page.press("/")
    page.evaluate("document.getElementById('search').value = ''")
    page.type("merge_qkv")
    page.press("Enter")
    assert page.evaluate("document.querySelector('#drawer article:not([hidden])').dataset.transform") == "merge_qkv"
    page.evaluate("document.getElementById('search').focus()")
    page.evaluate("document.getElementById('search').value = ''")
    page.type("no such thing")
    assert "nothing found" in page.evaluate("document.getElementById('hits').innerText")
    assert page.problems == []


def test_the_table_sorts_by_its_heads(page, decoder):
    open_page(page, decoder)
    column = "[...document.querySelectorAll('#pipeline tbody tr')].map((r) => Number(r.children[7].dataset.value))"
    page.click("#pipeline th:nth-child(8) button")
    up = page.evaluate(column)
    page.click("#pipeline th:nth-child(8) button")
    assert up == sorted(up) and page.evaluate(column) == up[::-1]
    assert page.evaluate("document.querySelector('#pipeline th:nth-child(8)').ariaSort") == "descending"


@pytest.mark.exhaustive  # the short run: what the page shows and does, in this file
def test_dark_narrow_print_and_help(page, decoder):
    open_page(page, decoder)
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.media(scheme="dark")
    dark = until(page, f"(c => c !== '{light}' && c)(getComputedStyle(document.body).backgroundColor)")
    page.press("t")  # auto → light
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == light
    page.press("t")  # light → dark
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == dark
    page.press("?")
    assert page.evaluate("document.getElementById('help').open")
    page.press("Escape")
    page.size(400, 800)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    pdf = page.pdf()
    assert pdf.startswith(b"%PDF") and len(pdf) > 50_000
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == dark, "print changed the screen"
    assert page.problems == []


def test_names_that_look_like_code_stay_names(page, small):
    """`</script>`, quotes and a broken character in the model's name."""
    open_page(page, small)
    shown = page.evaluate("document.querySelector('h1').textContent")
    assert shown.startswith("</script><script>document.title='owned'</script> \"'&<!-- ünïcode")
    assert page.evaluate("document.title").startswith("</script>")
    assert page.problems == []


def test_a_graph_without_layers_and_without_a_match_opens_too(page, tmp_path):
    file = tmp_path / "report.html"
    write_report(dump_plain(tmp_path / "run"), file)
    open_page(page, file)
    assert page.evaluate("document.getElementById('said').textContent") == "no numbered layers"
    page.press("j")
    page.press("Enter")
    text = page.evaluate("document.querySelector('#drawer article:not([hidden])').innerText")
    assert "the graph is the same before and after" in text
    page.press("]")
    assert painted(page, "document.getElementById('overview')") > 100
    assert page.problems == []


def test_a_fault_of_the_page_would_be_seen(page, small, tmp_path):
    """The checks above can fail: an error in the script, a foreign script and a request are all noticed."""
    text = small.read_text()
    for name, change in (
        ("script", ("<body>", "<body><script>alert(1)</script>")),
        ("request", ("<main>", '<main><img src="http://127.0.0.1:9/x.png">')),
    ):
        file = tmp_path / f"{name}.html"
        file.write_text(text.replace(*change))
        open_page(page, file)
        assert any("Content Security Policy" in problem for problem in page.problems), name
    page.evaluate("setTimeout(() => { throw new Error('planted'); })")
    end = time.monotonic() + PATIENCE
    while not any("planted" in problem for problem in page.problems):
        assert time.monotonic() < end
        page.evaluate("1")
