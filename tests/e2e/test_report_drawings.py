"""The drawings of the report in a real browser: fit, pan, zoom, labels, code beside nodes, two sides."""

from __future__ import annotations

import pytest
from browser import chromium, open_page, until

pytest_plugins = ["report_pages"]  # the reports and the browser
pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium here: apt-get install chromium")

INSIDE = "document.querySelector('#inside .canvas')._cyreg.cy"
ARTICLE = "document.querySelector('#drawer article:not([hidden])')"


def outside_window(page, drawing):
    """How many nodes of a drawing are not wholly in its window."""
    return page.evaluate(
        f"(() => {{ const h = document.querySelector('{drawing}'), cy = h.querySelector('.canvas')._cyreg.cy;"
        " return cy.nodes('.body, .chip').filter((n) => { const b = n.renderedBoundingBox({includeOverlays: false});"
        " return b.x1 < -1 || b.y1 < -1 || b.x2 > h.clientWidth + 1 || b.y2 > h.clientHeight + 1; }).length; })()"
    )


def choose_step(page, number):
    page.evaluate(
        f"(() => {{ const s = document.getElementById('step'); s.value = '{number}';"
        " s.dispatchEvent(new Event('change')); })()"
    )


def test_what_counts_stands_first(page, decoder):
    open_page(page, decoder)
    tiles = page.evaluate("[...document.querySelectorAll('#headline li')].map((li) => li.innerText)")
    assert [tile.split("\n")[0] for tile in tiles] == [
        *("kernel launches a token", "bytes a token", "matches checked numerically", "matches proved equal")
    ]
    assert "→" in tiles[0] and "fewer" in tiles[0] and "GB" in tiles[1] and "weights" in tiles[1]
    assert "0 %" in tiles[2] and "graft dump --verify" in tiles[2] and "0 %" in tiles[3]
    first = page.evaluate("document.querySelector('#headline').getBoundingClientRect().bottom")
    assert first < page.evaluate("document.querySelector('#pipeline').getBoundingClientRect().top") and first < 600


def test_drawings_fit_pan_and_zoom_and_have_a_map(page, decoder):
    open_page(page, decoder)
    map_hidden = "document.querySelector('#inside .minimap').hidden"
    for number in range(page.evaluate("document.getElementById('step').options.length")):
        choose_step(page, number)
        for name in ("overview", "inside"):
            page.evaluate(f"document.querySelector('[data-for={name}][data-zoom=fit]').click()")
            assert outside_window(page, f"#{name}") == 0, (number, name)
        until(page, map_hidden)
    for _ in range(6):
        page.click("[data-for=inside][data-zoom='1.25']")
    assert outside_window(page, "#inside") > 0
    until(page, f"!{map_hidden}")
    before = page.evaluate(f"{INSIDE}.pan()")
    page.scroll_to("#inside .minimap")
    box = page.evaluate("document.querySelector('#inside .minimap').getBoundingClientRect().toJSON()")
    page.click_at(box["x"] + box["width"] * 0.8, box["y"] + box["height"] * 0.9)
    after = page.evaluate(f"{INSIDE}.pan()")
    assert after["y"] < before["y"] - 50
    page.evaluate("document.getElementById('inside').focus()")
    page.press("ArrowUp")
    assert page.evaluate(f"{INSIDE}.pan()")["y"] > after["y"]
    for _ in range(80):  # however far it is moved, some of it stays in the window
        page.press("ArrowLeft")
    left = page.evaluate(
        f"{INSIDE}.nodes('.body').filter((n) => n.renderedPosition().x > 0 && n.renderedPosition().x < 600).length"
    )
    assert left > 0
    page.press("0")
    assert outside_window(page, "#inside") == 0 and page.problems == []


def test_a_wheel_moves_the_drawing_and_at_its_end_the_page(page, decoder):
    open_page(page, decoder)
    page.scroll_to("#layers", "start")
    box = page.evaluate("document.getElementById('inside').getBoundingClientRect().toJSON()")
    at = {"x": box["x"] + 200, "y": box["y"] + 200}
    page.evaluate("new Promise((done) => setTimeout(done, 300))")  # the page has come to rest
    scrolled = page.evaluate("scrollY")
    start = page.evaluate(f"{INSIDE}.pan()")["y"]
    page.call("Input.dispatchMouseEvent", type="mouseWheel", deltaX=0, deltaY=120, **at)
    until(page, f"{INSIDE}.pan().y < {start} - 50")
    assert page.evaluate("scrollY") == scrolled
    zoom = page.evaluate(f"{INSIDE}.zoom()")
    page.call("Input.dispatchMouseEvent", type="mouseWheel", deltaX=0, deltaY=-120, modifiers=2, **at)
    until(page, f"{INSIDE}.zoom() > {zoom}")
    page.evaluate("document.querySelector('[data-for=inside][data-zoom=fit]').click()")
    page.call("Input.dispatchMouseEvent", type="mouseWheel", deltaX=0, deltaY=120, **at)
    until(page, f"scrollY > {scrolled}")


@pytest.mark.exhaustive  # the short run: unit/workbench/test_report_names.py: the words
def test_labels_are_whole_and_in_words(page, decoder):
    """No label is cut; sizes are words, merged weights have all their names, and no arrow goes both ways."""
    open_page(page, decoder)
    found = []
    for number in range(page.evaluate("document.getElementById('step').options.length")):
        choose_step(page, number)
        for name in ("overview", "inside"):
            cy = f"document.querySelector('#{name} .canvas')._cyreg.cy"
            found += page.evaluate(f"{cy}.nodes().map((n) => n.data('label'))")
            ends = page.evaluate(f"{cy}.edges().map((edge) => [edge.source().id(), edge.target().id()])")
            assert not [1 for a, b in ends if [b, a] in ends], (number, name)
    text = "\n".join(found)
    assert "…" not in text and "bf16[batch, tokens, 4096]" in text and "linear · q_proj + k_proj + v_proj" in text
    assert "linear · gate_proj + up_proj" in text
    assert page.evaluate(r"!/[\[ ,]s\d+[,\]]/.test(" + repr(text.replace("\n", " ")) + ")")
    again = f"{INSIDE}.nodes('.body').map((n) => n.data('label'))"
    labels = page.evaluate(again)
    page.press("t")
    assert page.evaluate(again) == labels, "another theme has other labels"
    wide = page.evaluate(
        f"{INSIDE}.nodes('.body').filter((n) => n.boundingBox({{includeLabels: true}}).w > n.outerWidth() + 6).length"
    )
    assert wide == 0, "a label is wider than its node"


def test_code_and_nodes_show_each_other(page, decoder):
    open_page(page, decoder)
    page.scroll_to("#layers", "start")
    at = page.evaluate(
        "(() => { const c = document.querySelector('#inside .canvas'), b = c.getBoundingClientRect();"
        " const rope = c._cyreg.cy.nodes('.fused').filter((n) => n.data('node').item.op === 'graft.rope')[0];"
        " const p = rope.renderedPosition();"
        " return {x: b.x + p.x, y: b.y + p.y}; })()"
    )
    page.click_at(at["x"], at["y"])
    chosen = "[...document.querySelectorAll('#code .chosen')].map((line) => line.textContent)"
    (line,) = until(page, f"(c => c.length && c)({chosen})")
    assert "q_embed" in line or "k_embed" in line or "apply_rotary" in line, line
    page.click("[data-tab=triton]")
    assert "@triton.jit" in page.evaluate("document.getElementById('code').innerText")
    page.click("[data-tab=python]")
    # the other way: a line of the model marks the nodes that came from it
    mark = (
        "[...document.querySelectorAll('#code .linked')].find((line) => line.textContent.includes('self.up_proj(x)'))"
    )
    page.evaluate("document.getElementById('layer-after').click()")
    page.evaluate(f"{mark}.click()")
    ops = page.evaluate(f"{INSIDE}.$(':selected').map((n) => n.data('node').item.op)")
    assert "graft.swiglu" in ops and ops.count("aten.linear") == 2
    assert "layer 2" in page.evaluate("document.getElementById('part-title').textContent")
    # generated code: of one node of the last graph, both ways
    for tab, part in (("cpp", "swiglu(a)"), ("triton", "triton_poi_0.run")):
        page.evaluate("document.getElementById('layer-after').click()")
        page.click(f"[data-tab={tab}]")
        page.evaluate("document.querySelector('#code .linked').click()")
        assert "%swiglu_default_1" in page.evaluate("document.getElementById('node').innerText").split("\n")
        assert part in "".join(page.evaluate(chosen))
    assert page.problems == []


def test_search_finds_merged_weights_in_folded_layers(page, decoder):
    open_page(page, decoder)
    page.press("/")
    page.type("layers.4 k_proj")
    page.press("Enter")
    assert "layer 4" in page.evaluate("document.getElementById('part-title').textContent")
    assert "model.layers.4.self_attn.k_proj.weight" in page.evaluate("document.getElementById('node').innerText")


def test_before_and_after_stand_side_by_side(page, decoder):
    open_page(page, decoder)
    page.click("#pipeline tbody [data-open=fuse_swiglu]")
    rows = page.evaluate(
        f"[...{ARTICLE}.querySelectorAll('.row.replaced')].map((row) => [...row.children].map((c) => c.innerText))"
    )
    assert any("aten.mul" in left and "graft.swiglu" in right for left, right in rows)
    both = page.evaluate(
        f"[...{ARTICLE}.querySelector('.row.replaced').children].map((c) => c.getBoundingClientRect().toJSON())"
    )
    assert both[0]["y"] == both[1]["y"] and both[0]["right"] <= both[1]["x"] + 1
    assert page.evaluate(f"{ARTICLE}.querySelector('.diff').hidden")
    page.click("#drawer article:not([hidden]) [data-text=lines]")
    assert not page.evaluate(f"{ARTICLE}.querySelector('.diff').hidden")
    assert page.evaluate(f"{ARTICLE}.querySelector('.sides').hidden")
    page.click("#drawer article:not([hidden]) [data-view=beside]")
    labels = "c._cyreg.cy.nodes('.body').map((n) => n.data('label'))"
    before, after = page.evaluate(f"[...{ARTICLE}.querySelectorAll('.canvas')].map((c) => {labels})")
    assert any("− mul" in label for label in before) and not any("swiglu" in label for label in before)
    assert any("+ swiglu" in label for label in after) and not any(
        "silu" in label for label in after if "swiglu" not in label
    )
    assert page.problems == []
