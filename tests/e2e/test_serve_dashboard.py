"""The dashboard in a real browser: what it shows is what the server does."""

from __future__ import annotations

import json
import os
import signal

import pytest
from browser import browser, chromium, until

from serve_cases import http_client, sent, serving
from stub_engine import PAUSE

pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium here: apt-get install chromium")


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def server():
    with serving("chat", "--restart", "--api-key", "secret") as found:
        yield found


def text(window, name):
    return window.evaluate(f"document.getElementById('{name}').textContent")


def opened(window, server):
    window.open(server.url + "/dashboard")
    until(window, "document.getElementById('wrong').textContent.includes('API key is missing')")
    window.evaluate(
        "(document.getElementById('key').value = 'secret',"
        " document.getElementById('key').dispatchEvent(new Event('change')))"
    )
    until(window, "document.documentElement.dataset.ready")
    window.problems.clear()  # the 401 of before


def test_live_requests_blocks_and_an_engine_that_dies(window, server):
    with http_client(server.url, headers={"Authorization": "Bearer secret"}) as client:
        client.post("/v1/completions", json={"prompt": [7, 8], "max_tokens": 5}).raise_for_status()
        opened(window, server)
        assert text(window, "status") == "ready" and text(window, "wrong") == ""
        assert not window.evaluate("document.getElementById('nobody').hidden")
        # three blocks in use, one kept: as the events of the stub tell
        until(window, "JSON.stringify([cells.length, ...cells.slice(0, 5)]) === '[100,2,2,2,1,0]'")
        assert window.evaluate("JSON.stringify(parents)") == "[-1,0,1,0]"
        before = client.post("/v1/completions", json={"prompt": "say:"}).json()["usage"]["completion_tokens"]
        until(window, f"now.generation_tokens >= {5 + before}")
        with sent(server.url, {"prompt": [PAUSE, 9], "max_tokens": 5}, key="secret"):
            until(
                window,
                "!document.getElementById('nobody').hidden || document.querySelectorAll('#requests td').length",
            )
            until(window, "document.querySelector('#requests .state')?.textContent === 'writes'")
            row = window.evaluate("[...document.querySelectorAll('#requests td')].map((one) => one.textContent)")
            assert row[1] == "/v1/completions" and row[3] == "2" and row[6] == "1"
        until(window, "!document.getElementById('nobody').hidden")
        until(window, "document.getElementById('counts').textContent.includes('ended: abort')")
        window.press("m")
        window.press("ArrowRight")
        window.press("ArrowRight")
        window.press("ArrowRight")
        window.press("ArrowRight")
        assert text(window, "about") == "Cell 3: kept for reuse, block 2 of its text, taken 1 times, 0 follow on it."
        assert window.problems == []
        assert all(url.startswith((server.url, "data:")) for url in window.requests)
        os.kill(server.engine, signal.SIGKILL)
        until(window, "document.getElementById('wrong').textContent.includes('SIGKILL')")
        until(window, "document.getElementById('wrong').textContent === '' && now.restarts === 1")
        server.signal()
        assert server.ended() == 0  # a page that looks holds up no drain


def test_keys_pause_and_turn_dark(window, server):
    opened(window, server)
    scheme = "document.documentElement.dataset.scheme"
    assert window.evaluate(scheme) == "light"
    window.press("d")
    assert window.evaluate(scheme) == "dark"
    window.press("p")
    assert text(window, "pause") == "Go on"
    seen = window.evaluate("now.time")
    window.press("p")
    until(window, f"now.time > {json.dumps(seen)}")
    window.evaluate("localStorage.clear()")
    window.size(400, 800)
    assert window.evaluate("document.documentElement.scrollWidth") <= 400


def test_both_pages_are_small(server):
    with http_client(server.url) as client:
        sizes = [len(client.get(path).content) for path in ("/", "/dashboard")]
        assert all(sizes) and sum(sizes) < 300_000
        assert client.get("/v1/dashboard").status_code == 401
