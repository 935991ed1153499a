"""The page that the server shows, in a real browser."""

from __future__ import annotations

import pytest
from browser import browser, chromium, until

from serve_cases import serving

pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium here: apt-get install chromium")
LAST = "[...document.querySelectorAll('.answer')].at(-1)"
IDLE = "document.body.dataset.busy === ''"


@pytest.fixture(scope="module")
def server():
    with serving("chat", "--api-key", "secret") as found:
        yield found


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def page(server, window):
    window.open(server.url)
    until(window, "document.documentElement.dataset.ready")
    return window


def say(page, text):
    page.click("#words")
    page.type(text)
    page.press("Enter")


def test_a_conversation(page, server):
    assert "API key is missing" in page.evaluate("document.getElementById('version').textContent")
    page.evaluate(
        "(document.getElementById('key').value = 'secret',"
        " document.getElementById('key').dispatchEvent(new Event('change')))"
    )
    until(page, "document.getElementById('model').value === 'chat'")
    page.problems.clear()  # the 401 of before
    page.evaluate("(document.getElementById('max_tokens').value = 6)")
    say(page, "hi")
    until(page, f"{IDLE} && {LAST}?.querySelector('.foot span').textContent")
    told = page.evaluate(f"{LAST}.innerText")
    assert "6 tokens" in told and "first token" in told and "cut off at max tokens" in told
    page.click(".answer:last-child .foot button:last-child")  # regenerate
    until(page, f"{IDLE} && {LAST}?.querySelector('.foot span').textContent")
    assert page.evaluate("document.querySelectorAll('.answer').length") == 1
    page.press("Escape")
    assert page.problems == [] and all(url.startswith((server.url, "data:")) for url in page.requests)


THOUGHTS = f"{LAST}.querySelector('.thoughts')"


@pytest.fixture
def thinking(window):
    with serving("thinker") as found:
        window.open(found.url)
        until(
            window, "document.documentElement.dataset.ready && document.getElementById('model').value === 'thinker'"
        )
        yield window


def test_thoughts_are_open_while_they_come_and_folded_behind(thinking):
    page = thinking
    watched = "{subtree: true, attributeFilter: ['open'], attributeOldValue: true}"
    page.evaluate(
        "(window.opened = [], new MutationObserver((seen) => seen.forEach((one) => opened.push(one.oldValue)))"
        f".observe(document.getElementById('talk'), {watched}))"
    )
    say(page, f"say:<think>{'hmm <b>so</b> ' * 20}</think>It is 4.")
    until(page, f"{IDLE} && {LAST}?.querySelector('.foot span').textContent")
    assert page.evaluate(f"{LAST}.querySelector('.body').textContent").strip() == "It is 4."
    assert page.evaluate("opened") == [None, ""]  # they were unfolded, and then folded
    assert not page.evaluate(f"{THOUGHTS}.open") and not page.evaluate(f"{THOUGHTS}.hidden")
    assert page.evaluate(f"{THOUGHTS}.textContent").startswith("Thoughtshmm <b>so</b> hmm")
    assert page.evaluate(f"{THOUGHTS}.querySelectorAll('b').length") == 0
    page.click(".answer .thoughts summary")
    assert page.evaluate(f"{THOUGHTS}.open")
    say(page, "once more")  # the page is drawn anew: what was thought stays with its answer
    until(page, f"{IDLE} && document.querySelectorAll('.answer .thoughts:not([hidden])').length === 2")
    assert "hmm" in page.evaluate("document.querySelector('.answer .thoughts').textContent")
    assert page.evaluate("messages.filter((one) => one.content === 'It is 4.').length") == 2
    page.click("#new")
    say(page, "say:plain")
    until(page, f"{IDLE} && {LAST}?.querySelector('.foot span').textContent")
    assert page.evaluate(f"{THOUGHTS}.hidden") and page.problems == []


def test_thoughts_that_break_off_stay_open(thinking):
    thinking.evaluate("(document.getElementById('max_tokens').value = 12)")
    say(thinking, "say:<think>and then it went on and on and on</think>never")
    until(thinking, f"{IDLE} && {LAST}?.querySelector('.foot span').textContent")
    assert thinking.evaluate(f"{THOUGHTS}.open") and "cut off" in thinking.evaluate(f"{LAST}.innerText")
    assert "and then" in thinking.evaluate(f"{THOUGHTS}.innerText")


def test_an_answer_is_never_read_as_html(page):
    text = "# Head\\n\\n<img src=x onerror=alert(1)> `a<b` **bold**\\n\\n- one\\n- two\\n\\n```py\\nx < 1\\n```"
    page.evaluate(f"render(document.getElementById('talk'), '{text}')")
    assert page.evaluate("document.querySelectorAll('#talk img').length") == 0
    found = page.evaluate("[...document.getElementById('talk').children].map((one) => one.tagName).join()")
    assert found == "H3,P,UL,PRE"
    assert page.evaluate("document.querySelector('#talk pre').textContent") == "x < 1"


def test_dark_mode_follows_the_system_and_the_button(page):
    assert page.evaluate("document.documentElement.dataset.scheme") == "light"
    page.media(scheme="dark")
    until(page, "document.documentElement.dataset.scheme === 'dark'")
    page.click("#scheme")
    assert page.evaluate("document.documentElement.dataset.scheme") == "light"
