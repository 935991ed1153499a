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
    *(
        "dom.js",
        "data.js",
        "theme.js",
        "scene.js",
        "layout.js",
        "viewport.js",
        "minimap.js",
        "draw.js",
        "highlight.js",
        "code.js",
    ),
    *("layers.js", "transforms.js", "search.js", "keys.js", "print.js", "main.js"),
)
VENDOR = ("cytoscape.min.js", "dagre.min.js")


def write_report(
    run: str | Path,
    output: Path,
    kernels: Path | None = None,
    progress: Progress | None = None,
    code: Path | None = None,
) -> ReportData:
    """Writes the report of a run folder to `output`: whole, or not at all."""
    check_output(output)
    data = collect(run, kernels, progress, code)
    if progress:
        progress("writing the page", 0, 1)
    write_page(output, render(data))
    return data


def check_output(output: Path) -> None:
    if output.is_dir():
        raise ReportError(f"{output} is a folder; name a file: -o {output / 'report.html'}")
    if not output.absolute().parent.is_dir():
        raise ReportError(f"{output.absolute().parent} does not exist; make the folder first, or choose another file")


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
        code=Markup(safe_json(data.code)),
        less=less,
        size=size,
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
    env.filters |= {"percent": percent}
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


def size(*values: float) -> str:
    """`4.54 GB`, `382 → 367 kB` in one unit: three digits, or as many as tell the values apart."""
    unit, name = next(((u, n) for u, n in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if max(values) >= u), (1, "B"))
    largest = max(values) / unit
    digits = 0 if unit == 1 or largest >= 100 else 1 if largest >= 10 else 2
    while digits < 4 and unit > 1 and len({f"{v / unit:.{digits}f}" for v in values}) < len(set(values)):
        digits += 1
    return f"{' → '.join(f'{value / unit:,.{digits}f}' for value in values)} {name}"


def less(before: float, after: float) -> str:
    """`71 % fewer`, `0.1 % more`, `as many`."""
    if before == after or not before:
        return "as many"
    change = 100 * abs(before - after) / before
    return f"{change:.{0 if change >= 1 else 2}f} % {'fewer' if after < before else 'more'}"


def percent(part: int, whole: int) -> str:
    """Whole only where all are: 321 of 322 is 99.7 %."""
    if not whole:
        return "none to check"
    exact = 100 * part / whole
    return f"{exact:.0f} %" if exact in (0, 100) or 1 <= exact <= 99 else f"{exact:.1f} %"


def capitalize_first(text: str) -> str:
    """A sentence's first letter; jinja's own filter makes the others small."""
    return text[:1].upper() + text[1:]
