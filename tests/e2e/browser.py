"""A headless Chromium for tests, driven over its debugging pipe: JSON messages that end in NUL, and no package."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE = 30.0  # seconds until a page must have done what it was asked; only a hang takes as long
LIMIT = 60.0  # seconds for one answer, on a machine that does other things too


def chromium() -> str | None:
    """The path of a Chromium, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class BrowserError(Exception):
    """The browser did not answer, or answered with an error."""


class Browser:
    """One page at a time. `problems` has every console error, exception and refused request since it was opened."""

    def __init__(self, commands: int, answers: int) -> None:
        self.commands, self.answers = commands, answers
        self.buffer, self.number, self.session, self.target = b"", 0, "", ""
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.loaded = False

    def open(self, address: str, width: int = 1440, height: int = 900) -> float:
        """Loads a page; how many seconds that took, by the page's own clock."""
        if self.session:
            self.close()
        self.target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=self.target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.size(width, height)
        self.problems, self.requests, self.loaded = [], [], False
        self.call("Page.navigate", url=address)
        end = time.monotonic() + LIMIT
        while not self.loaded:
            self.take(end)
        return self.evaluate("performance.timing.loadEventStart - performance.timing.navigationStart") / 1e3

    def close(self) -> None:
        """Closes the page; another can be opened."""
        self.session = ""
        self.call("Target.closeTarget", targetId=self.target)

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def media(self, media: str = "", **features: str) -> None:
        """`media("print")`, `media(scheme="dark")`."""
        given = [{"name": f"prefers-color-{name}", "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", media=media, features=given)

    def evaluate(self, script: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """A real click in the middle of an element."""
        quoted = json.dumps(selector)
        self.scroll_to(selector)
        box = self.evaluate(f"document.querySelector({quoted}).getBoundingClientRect().toJSON()")
        self.click_at(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)

    def scroll_to(self, selector: str, block: str = "center") -> None:
        """Until the page has seen it: its scroll events come with the next frame."""
        quoted, way = json.dumps(selector), json.dumps({"block": block, "behavior": "instant"})
        frames = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done())))"
        self.evaluate(f"(document.querySelector({quoted}).scrollIntoView({way}), {frames})")

    def click_at(self, x: float, y: float) -> None:
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def screenshot(self, file: Path, *, whole: bool = False) -> None:
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        file.write_bytes(base64.b64decode(data))

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + LIMIT
        while True:
            answer = self.take(end)
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def take(self, end: float) -> dict[str, Any]:
        """The next message; events are noted on the way."""
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.answers], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise BrowserError(f"no answer within {LIMIT:.0f} s")
            data = os.read(self.answers, 1 << 16)
            if not data:
                raise BrowserError("the browser closed")
            self.buffer += data
        text, _, self.buffer = self.buffer.partition(b"\0")
        message = json.loads(text)
        self.note(message.get("method", ""), message.get("params", {}))
        return message

    def note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self.loaded = True
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(" ".join(str(a.get("value", a.get("description"))) for a in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A Chromium of its own with `profile` as its folder; it ends with the block."""
    to_read, to_write = high_pipe()
    from_read, from_write = high_pipe()
    options = [
        *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run"),
        *("--disable-dev-shm-usage", "--hide-scrollbars", "--disable-background-networking"),
        f"--user-data-dir={profile}",
    ]
    path = chromium() or "chromium"
    quiet = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_WRONLY, 0) for number in (1, 2)]
    pipes = [(os.POSIX_SPAWN_DUP2, to_read, 3), (os.POSIX_SPAWN_DUP2, from_write, 4)]  # it reads 3 and writes 4
    process = os.posix_spawn(path, [path, *options], os.environ, file_actions=[*quiet, *pipes], setpgroup=0)
    os.close(to_read)
    os.close(from_write)
    try:
        yield Browser(to_write, from_read)
    finally:
        os.close(to_write)
        os.close(from_read)
        os.killpg(process, signal.SIGKILL)  # its own group: the browser and its helpers; nothing of it is kept
        os.waitpid(process, 0)


def high_pipe() -> tuple[int, int]:
    """A pipe whose numbers are not those that the browser's ends get."""
    pair = os.pipe()
    moved = fcntl.fcntl(pair[0], fcntl.F_DUPFD_CLOEXEC, 10), fcntl.fcntl(pair[1], fcntl.F_DUPFD_CLOEXEC, 10)
    for number in pair:
        os.close(number)
    return moved


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
