"""The transform's file and its tests, as text."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Graph

from graft.ir.io.text import call_text, target_text
from graft.ir.nodes import calls
from graft.workbench.scaffold.body import (
    Body,
    Tried,
    arguments,
    function_name,
    literals_of,
    returned,
    tensor_arguments,
    typed_arguments,
)
from graft.workbench.scaffold.destination import Destination
from graft.workbench.scaffold.names import class_name
from graft.workbench.scaffold.op import LINE, import_block
from graft.workbench.scaffold.render import fill


@dataclass(frozen=True)
class New:
    """All that the texts are made from. op: '' where none is made; kernel: whether it has a Triton kernel; native:
    whether it has one in C++."""

    name: str
    op: str
    body: Body
    tried: Tried
    destination: Destination
    kernel: bool
    native: bool = False


def transform_text(new: New) -> str:
    body, op = new.body, new.op
    names, typed = arguments(body.pattern), typed_arguments(body.pattern)
    replacement = body.replacement or (
        f"def {op}_fused({', '.join(f'{name}: {kind}' for name, kind in typed)}) -> {returned(body.pattern)}:\n"
        f"    return torch.ops.graft.{op}({', '.join(names)})"
    )
    numbers = literals_of(body.pattern)
    call = ", ".join(name if name in numbers else f"%{name}" for name in names)
    result = "out" if "y" in names else "y"
    graft = ["from graft import PatternTransform, Rewrite, TransformRegistry"]
    if new.destination.checkout:
        graft = ["from graft.passes.patterns import PatternTransform, Rewrite"]
        graft.append("from graft.passes.registry import TransformRegistry")
    home = f"{new.destination.op_module(op)}.{'native' if new.native else 'op'}"
    register = f"import {home}  # noqa: F401 (registers the op)"
    return fill(
        "transform",
        {
            "name": new.name,
            "class_name": class_name(new.name),
            "summary": f"{body.pattern_name} becomes {f'graft::{op}' if op else function_name(replacement)}",
            "imports": import_block(
                ("import torch", *body.imports, "from torch import Tensor"), body.pattern, replacement
            ),
            "graft_imports": "\n".join(graft),
            "register": f"\n{register}\n" if op and not new.destination.checkout else "",
            "pattern": body.pattern,
            "replacement": replacement,
            "pattern_name": body.pattern_name,
            "replacement_name": function_name(replacement),
            "shapes": dict_text(body.shapes),
            "options": "" if new.tried.exact else ", exact=False",
            "before": doc_text(new.tried.before, numbers),
            "after": f"%{result} = graft.{op}({call})" if op else doc_text(new.tried.after, numbers),
            "numerics": numerics(new),
        },
    )


def numerics(new: New) -> str:
    if new.op:
        return "the reference is the pattern, bit for bit; a kernel may be float32 inside and round once."
    return "the same bits." if new.tried.exact else "a rounding or two of the working dtype off."


def doc_text(graph: Graph, numbers: Mapping[str, int | float]) -> str:
    """A graph as the lines of a docstring: no types, no overloads, arguments by their names."""
    lines = [re.sub(r"aten\.(\w+)(\.\w+)?\(", r"\1(", call_text(node)) for node in calls(graph)]
    for node in graph.nodes:
        if node.op == "placeholder":
            lines = [re.sub(rf"%{node.name}\b", f"%{node.meta['pattern_input']}", line) for line in lines]
    for name, value in numbers.items():
        if list(numbers.values()).count(value) == 1:
            lines = [re.sub(rf"(?<=, ){re.escape(str(value))}(?=[,)])", name, line) for line in lines]
    indent = " " * 13  # after `    before:  `
    folded = [textwrap.wrap(line, LINE - len(indent), subsequent_indent="    ") for line in lines]
    return f"\n{indent}".join(part for parts in folded for part in parts)


def dict_text(values: Mapping[str, str]) -> str:
    return "{" + ", ".join(f'"{key}": "{value}"' for key, value in values.items()) + "}"


# ── tests ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_text(new: New) -> str:
    body, destination = new.body, new.destination
    numbers = literals_of(body.pattern)
    given = ", ".join(f"{n}={numbers[n]}" if n in numbers else n for n in arguments(body.pattern))
    call = f"{body.pattern_name}({given})"
    made = f"graft.{new.op}" if new.op else target_text(list(calls(new.tried.after))[-1].target)
    extra = body.extra_tests
    if new.op:
        extra += fill("test_op", {"op": new.op})
    if new.kernel:
        extra += fill("test_triton", {"op": new.op, "op_module": destination.op_module(new.op)})
    text = fill(
        "test",
        {
            "name": new.name,
            "standard": standard_imports(new),
            "imports": test_imports(new),
            "interpreter": INTERPRETER if new.kernel and not destination.checkout else "",
            "config": "None  # as the library and plugins list it",
            "signature": ", ".join(tensor_arguments(body.pattern)),
            "call": call,
            "wrong": body.wrong or f"{call} * 1.25 + 0.25",
            "made": made,
            "roundings": str(max(2, len(list(calls(new.tried.before))))),
            "extra_tests": extra.rstrip("\n"),
        },
    )
    return text.rstrip("\n") + "\n"


def standard_imports(new: New) -> str:
    return "import os\n\n" if new.kernel and not new.destination.checkout else ""


INTERPRETER = """
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before a kernel is defined
"""


def test_imports(new: New) -> str:
    """Imports of graft and of what is new: one sorted block in a checkout, two in a plugin."""
    helpers = [
        "assert_fuses",
        "assert_matches_eager",
        "assert_metadata_preserved",
        "assert_refused_or_harmless",
        "matrix",
    ]
    if new.body.extra_tests:
        helpers.append("assert_not_fuses")
    if new.op:
        helpers += ["assert_near_float64", "assert_op_safe"]
    graft = {
        "graft.testing": "(\n" + "".join(f"    {name},\n" for name in sorted(helpers)) + ")",
        "graft.testing.negatives": "examples, negatives, positive",
        "graft.passes.base": "Stage, TransformConfig",
        "graft.passes.registry": "TransformRegistry",
    }
    if new.kernel:
        graft["graft.testing.interpreter"] = "round_to_nearest"
    if not new.destination.checkout:
        del graft["graft.passes.base"], graft["graft.passes.registry"]
        graft["graft"] = "Stage, TransformConfig, TransformRegistry"
    own = {new.destination.module(new.name): f"REWRITES, {new.body.pattern_name}"}
    if new.op:
        folder = new.destination.op_module(new.op)
        own |= {f"{folder}.cases": "CASES, wrong", f"{folder}.reference": new.op}
    blocks = [graft | own] if new.destination.checkout else [graft, own]
    lines = ["\n".join(f"from {module} import {names}" for module, names in sorted(b.items())) for b in blocks]
    return "\n\n".join(lines) + "\n"
