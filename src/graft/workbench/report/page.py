"""From what was collected to one HTML file. Everything that comes from a model is escaped; nothing is loaded."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from graft.base.errors import ReportError
from graft.base.files import Progress, write_whole
from graft.workbench.discover.markdown import assumptions, details
from graft.workbench.report.data import ReportData, collect

PACKAGE = files("graft.workbench.report")
STYLES = ("base.css", "parts.css", "print.css")
# in order: each file may use what those before it define
SCRIPTS = (
    *("data.js", "theme.js", "scene.js", "layout.js", "draw.js", "layers.js"),
    *("transforms.js", "search.js", "keys.js", "print.js", "main.js"),
)
VENDOR = ("cytoscape.min.js", "dagre.min.js")


def write_report(
    run: str | Path, output: Path, kernels: Path | None = None, progress: Progress | None = None
) -> ReportData:
    """Writes the report of a run folder to `output`: whole, or not at all."""
    if output.is_dir():
        raise ReportError(f"{output} is a folder; name a file: -o {output / 'report.html'}")
    if not output.absolute().parent.is_dir():
        raise ReportError(f"{output.absolute().parent} does not exist; make the folder first, or choose another file")
    data = collect(run, kernels, progress)
    if progress:
        progress("writing the page", 0, 1)
    write_page(output, render(data))
    return data


def write_page(output: Path, text: str) -> None:
    def refuse(error: Exception) -> ReportError:
        said = (error.strerror if isinstance(error, OSError) else None) or error
        return ReportError(f"cannot write {output}: {said}; choose another file with -o")

    # a name may hold half of a surrogate pair, which is no text and shows as its code
    write_whole(output, text.encode("utf-8", "backslashreplace"), refuse)


def render(data: ReportData) -> str:
    styles = "\n".join(read("static", name) for name in STYLES)
    own = "\n".join(read("static", name) for name in SCRIPTS)
    scripts = [*(read("vendor", name) for name in VENDOR), f"(() => {{\n'use strict';\n{own}\n}})();"]
    page = environment().get_template("report.html.j2")
    return page.render(
        data=data,
        discovery=data.discovery,
        assumptions=assumptions(data.discovery) if data.discovery else [],
        details=details,
        styles=Markup(styles),
        scripts=[Markup(script) for script in scripts],
        policy=policy(scripts),
        graphs=Markup(safe_json(data.graphs)),
        docs=Markup(safe_json({view.record.name: view.doc.split("\n")[0] for view in data.transforms})),
    )


def environment() -> Environment:
    env = Environment(
        loader=FunctionLoader(lambda name: read("templates", name)),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters |= {"seconds": seconds, "share": share, "number": number, "capitalize_first": capitalize_first}
    return env


def read(folder: str, name: str) -> str:
    return (PACKAGE / folder / name).read_text(encoding="utf-8")


def policy(scripts: list[str]) -> str:
    """Only these scripts run, and nothing is fetched: whatever a name holds, the browser refuses it."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"


def safe_json(value: Any) -> str:
    """JSON that can stand in a script element: no `<`, so that nothing in it ends the element or begins a comment."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e")


def seconds(value: float) -> str:
    """`0.283 s`, `12 ms`."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.0f} ms"


def share(value: float, whole: float) -> str:
    """A percentage for CSS."""
    return f"{100 * value / whole:.3f}%" if whole else "0%"


def number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def capitalize_first(text: str) -> str:
    """A sentence's first letter; jinja's own filter makes the others small."""
    return text[:1].upper() + text[1:]
