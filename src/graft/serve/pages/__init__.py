"""Pages that the server shows, each one file: no network, no other script than its own."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources

INCLUDED = re.compile(r"^//= (\S+)\n", re.M)  # a line of a page's script: the file that stands there


def read(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")


@cache
def page(name: str) -> tuple[bytes, dict[str, str]]:
    """The page and its headers. Its one script is allowed by its hash, and nothing else is loaded from anywhere."""
    text = INCLUDED.sub(lambda found: read(found[1]), read(f"{name}.html"))
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:;"
        " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
    return text.encode(), headers
