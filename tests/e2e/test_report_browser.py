"""The report in a real browser: it opens, says nothing on the console, and does what a click or a key asks."""

from __future__ import annotations

import time

import pytest
from browser import browser, chromium

from graft.workbench.report import write_report
from report_cases import HOSTILE, dump_deep, dump_plain, dump_stack

pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium here: apt-get install chromium")
PATIENCE = 30.0  # seconds until a page must have done what it was asked; only a hang takes as long


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """The report of 32 layers."""
    folder = tmp_path_factory.mktemp("deep")
    file = folder / "report.html"
    write_report(dump_deep(folder / "run"), file)
    return file


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """The same with 6 layers, which is there in a fifth of the time."""
    folder = tmp_path_factory.mktemp("decoder")
    file = folder / "report.html"
    run = dump_deep(folder / "run", 6)
    (run / "native.cpp").write_text(
        "// One step\n  // 0: %swiglu_default_1  model.layers.1.mlp\n  {\n    swiglu(a);\n  }\n"
    )
    (run / "inductor.py").write_text("# Topologically Sorted Source Nodes: [swiglu_default_1]\ntriton_poi_0.run()\n")
    write_report(run, file)
    return file


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    file = folder / "report.html"
    write_report(dump_stack(folder / "run", HOSTILE), file)
    return file


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def page(window):
    """A page of its own in the one browser, with the theme as the system says."""
    yield window
    window.evaluate("localStorage.clear()")
    window.close()


def until(page, script):
    end = time.monotonic() + PATIENCE
    while not (found := page.evaluate(script)):
        assert time.monotonic() < end, f"never true: {script}"
        time.sleep(0.02)
    return found


def open_page(page, file, **size):
    seconds = page.open(file.as_uri(), **size)
    drawn = float(until(page, "document.documentElement.dataset.ready")) / 1e3
    return seconds, drawn


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
