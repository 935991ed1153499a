"""The file: what a match replaced and what it made as two functions, seeded inputs, and the comparison."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from string import Template

import torch
from torch.fx import GraphModule, Node

from graft.base.errors import ReproRefused, UnknownMatch
from graft.ir.effects import is_mutating
from graft.ir.io.symbols import symbols_of
from graft.ir.nodes import calls, tensor_val
from graft.ops.cases import UNIT, tolerance
from graft.passes.dumps import WEIGHTS
from graft.passes.registry import TransformRegistry
from graft.passes.report import MatchRecord
from graft.workbench.discover.source import function_source
from graft.workbench.discover.values import restore_values
from graft.workbench.op_modules import import_lines
from graft.workbench.repro.pieces import Cut, cut, shape_of
from graft.workbench.runs import StoredRun

TEMPLATE = Path(__file__).with_name("file.txt")
LARGEST = 1 << 28  # elements of an input that is made up: 2 GB in float64


@dataclass(frozen=True)
class Listed:
    """A match as it is named on the command line."""

    id: str
    record: MatchRecord


def matches_of(run: StoredRun, transform: str = "") -> list[Listed]:
    """All matches of a run, or of one transform, numbered from 1 as the report lists them."""
    if transform:
        run.after(transform)  # an unknown one, or one that was off, is an error there
    return [
        Listed(f"{name}:{number}", match)
        for name, record in run.report.transforms.items()
        if not transform or name == transform
        for number, match in enumerate(record.matches, 1)
    ]


def find_match(run: StoredRun, name: str, transform: str = "") -> Listed:
    """`fuse_rope:3`, the number alone with `transform`, or the node that it ended at: `fuse_rope:mul_7`."""
    given, colon, which = name.rpartition(":")
    chosen = given if colon else transform
    if not chosen:
        raise UnknownMatch(name, [one.id for one in matches_of(run)], str(run.folder))
    listed = matches_of(run, chosen)
    for one in listed:
        if which.removeprefix("%") in (one.id.rpartition(":")[2], one.record.name):
            return one
    raise UnknownMatch(name, [one.id for one in listed], str(run.folder))


def repro_source(run: StoredRun, listed: Listed) -> str:
    """The whole file. What made-up inputs cannot show is an error that says why."""
    transform, _, number = listed.id.rpartition(":")
    record = run.report.transforms[transform]
    uncheckable = TransformRegistry.get(transform).uncheckable if transform in TransformRegistry.names() else ""
    if uncheckable:
        raise ReproRefused(f"a match of {transform} cannot be run beside what it replaced: {uncheckable}")
    graphs = [step.graph() for step in run.around(transform)]
    for gm in graphs:
        restore_values(gm)
    piece = cut(graphs[0], graphs[1], record.matches, int(number) - 1)
    stored = (run.folder / WEIGHTS).is_file()
    if piece.made_weights and not stored:
        raise ReproRefused(
            f"{transform} made the weight {piece.made_weights[0]} from others, and {run.folder} holds no weights;"
            " dump the model again with --weights"
        )
    functions = [bare(g, name) for g, name in ((piece.original, "original"), (piece.replacement, "replacement"))]
    limit, why = limit_of(piece, listed.record)
    weights = stored and any(node.op == "get_attr" for node in piece.inputs)
    filled = Template(TEMPLATE.read_text()).substitute(
        title=f"{listed.id} of {run.report.model or run.folder}: {listed.record.anchor}",
        command=f"graft repro {run.folder} --match {listed.id}",
        versions=f"graft {run.manifest.versions['graft']}, torch {run.manifest.versions['torch']}",
        sizes=sizes_text(piece),
        imports=imports_text(piece, weights),
        original=functions[0],
        replacement=functions[1],
        seeded=f"    stored = load_state({str(run.folder.resolve())!r})\n" if weights else "",
        inputs="\n".join(input_line(node, weights) for node in piece.inputs),
        limit=f"{limit:.1e}",
        why=why,
        written="True"
        if any(is_mutating(n) for g in (piece.original, piece.replacement) for n in calls(g.graph))
        else "False",
    )
    return re.sub(r"\n{4,}", "\n\n\n", filled)


def bare(gm: GraphModule, name: str) -> str:
    source = function_source(gm, name)
    return source[source.index("def ") :].rstrip()


def sizes_text(piece: Cut) -> str:
    symbols = symbols_of([node.meta.get("val") for node in piece.inputs])
    if not symbols:
        return "All sizes are those of the run."
    return (
        "Sizes that are known at run time only were given values: "
        + ", ".join(f"{s.name} = {s.hint}" for s in symbols)
        + "."
    )


def imports_text(piece: Cut, weights: bool) -> str:
    """torch alone, unless ops of graft or of a plugin are called, or weights are read."""
    lines = import_lines(node for gm in (piece.original, piece.replacement) for node in calls(gm.graph))
    lines += ["from graft.workbench.stored import load_state"] if weights else []
    return "\n".join(["", *lines]) + "\n" if lines else ""


def input_line(node: Node, weights: bool) -> str:
    """An argument of both functions, and what it was in the model."""
    value = tensor_val(node)
    shape = shape_of(node)
    assert value is not None
    note = f"  # %{node.name}: {node.meta.get('value_text') or value.dtype}"
    if math.prod(shape) > LARGEST:
        raise ReproRefused(f"%{node.name} has {math.prod(shape):,} elements, too many to be made up")
    if node.op == "get_attr" and weights:
        return f"        stored[{str(node.target)!r}],{note}"
    sizes = ", ".join(map(str, shape))
    if value.dtype is torch.bool:
        text = f"torch.rand([{sizes}], generator=generator) < 0.75"
    elif value.dtype.is_complex:
        text = f"torch.randn([{sizes}], generator=generator, dtype={value.dtype})"
    elif value.dtype.is_floating_point:
        text = f"torch.randn([{sizes}], generator=generator, dtype=torch.float64).to({value.dtype})"
    else:
        text = f"torch.randint(0, 2, [{sizes}], generator=generator, dtype={value.dtype})"
    return f"        {text},{note}"


def limit_of(piece: Cut, record: MatchRecord) -> tuple[float, str]:
    """How far the two may be apart, relative to the largest value: both round, by the coarsest dtype and the longest
    reduction; or what the numeric check of the run allowed, where that is more."""
    longest, coarsest = 1, torch.float64
    for node in [n for gm in (piece.original, piece.replacement) for n in gm.graph.nodes]:
        value = tensor_val(node)
        if value is not None and value.dtype in UNIT:
            coarsest = max(coarsest, value.dtype, key=UNIT.__getitem__)
            longest = max(longest, *shape_of(node)[-1:])
    limit = 2 * tolerance(coarsest, longest)
    dtype = str(coarsest).removeprefix("torch.")
    if record.numeric_check is not None and 2 * record.numeric_check.limit > limit:
        return 2 * record.numeric_check.limit, "twice what the numeric check of the run allowed against float64"
    return limit, f"a few roundings of {dtype}, reductions of {longest}"
