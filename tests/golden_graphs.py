"""The final graph and the report of every family on every route, as text: what a change of the house must not change.

    export PYTHONHASHSEED=0
    python tests/golden_graphs.py            # what differs from tests/golden
    python tests/golden_graphs.py --write    # stores what there is now; the diff of git shows what a change did

Times are left out. Texts name lines of Transformers and symbols of torch: they hold for the versions of
constraints.txt, and tests/unit/passes/test_golden_graphs.py is skipped on others.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conftest import FAMILIES, graph_of
from graft.ir.io.text import graph_text
from graft.models.load import load_model
from graft.passes.base import Context
from graft.passes.config import load_config
from graft.passes.pipeline import run_pipeline
from graft.passes.registry import TransformRegistry, load_all
from graft.passes.report import Report, TransformRecord

FOLDER = Path(__file__).parent / "golden"
ROUTES = ("eager", "native", "cuda")
# families with tensors whose strides are products of open sizes: torch counts those, unless it finds them kept
PRODUCTS = ("lfm2", "qwen3-next")


def on_meta() -> dict[str, Any]:
    """The decode fusions, on tensors without memory: the graph that a GPU gets."""
    load_all()
    return {"transforms": {name: {"devices": ["meta"]} for name in TransformRegistry.with_key("devices")}}


def golden(family: str, route: str) -> str:
    cuda = route == "cuda"
    model = load_model(f"tiny-{family}", dtype="bfloat16" if cuda else "float32", device="meta" if cuda else "cpu")
    gm = graph_of(model.module)
    backend = "eager" if cuda else route
    context = Context(route="decoder", backend=backend, context_length=model.context)
    report = run_pipeline(gm, load_config(on_meta() if cuda else None), context, model=model.name)
    return renumbered(f"{graph_text(gm.graph)}\n\n{report_text(report)}", products=family in PRODUCTS)


def renumbered(text: str, *, products: bool = False) -> str:
    """Symbols and reads of sizes in the order in which they appear: torch counts symbols on from whatever the process
    has captured before, and reads of sizes with those that nothing uses in the end. products: the same of these."""
    reads = ((r"\bs\d+\b", "s{}"), (r"\bsym_size_int(?:_\d+)?\b", "sym_size_int_{}"))
    for names, numbered in (*reads, *([(r"\bmul_\d+\b", "mul_{}")] if products else ())):
        seen = dict.fromkeys(re.findall(names, text))
        numbers = {name: numbered.format(index) for index, name in enumerate(seen)}
        text = re.sub(names, lambda found, numbers=numbers: numbers[found[0]], text)
    return text


def report_text(report: Report) -> str:
    lines = [line for record in report.transforms.values() for line in record_lines(record)]
    return "\n".join([*lines, *(f"note: {note}" for note in report.notes)]) + "\n"


def record_lines(record: TransformRecord) -> Iterator[str]:
    """Without the seconds."""
    yield f"{record.name} [{record.stage}] {record.status} {record.nodes_before} -> {record.nodes_after}".rstrip()
    if record.reason:
        yield f"  reason: {record.reason}"
    for match in record.matches:
        note = f" ({match.note})" if match.note else ""
        yield f"  {match.pattern or 'match'} at {match.anchor}{note}"
        yield f"    {' '.join(match.replaced)} -> {' '.join(match.made)}"
    for miss in record.near_misses:
        yield f"  near miss {miss.pattern} at {miss.anchor}: {miss.reason} ({miss.matched}/{miss.size})"


def path_of(family: str, route: str) -> Path:
    return FOLDER / f"{family}.{route}.txt"


def main(*options: str) -> int:
    """The number of texts that differ."""
    wrong = 0
    FOLDER.mkdir(exist_ok=True)
    for family in FAMILIES:
        for route in ROUTES:
            path, text = path_of(family, route), golden(family, route)
            if "--write" in options:
                path.write_text(text)
            elif not path.exists() or path.read_text() != text:
                wrong += 1
                print(f"{path.name} differs")
    return wrong


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
