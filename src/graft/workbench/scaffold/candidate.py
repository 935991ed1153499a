"""A candidate of `graft discover` as the body of a transform: its pattern, and the op that takes its place."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from graft.base.errors import GraftError, PatternError, ShapesUnknown, UnknownCandidate, UsageError
from graft.ir.nodes import output_node, placeholders
from graft.ir.patterns.arguments import example_dtype, size_of
from graft.ir.trace import trace_function
from graft.workbench.discover import Candidate, Discovery
from graft.workbench.discover.aten import aten_kernels
from graft.workbench.discover.installed import installed_kernels
from graft.workbench.discover.known import filling
from graft.workbench.discover.lookup import look_in_graft
from graft.workbench.discover.source import function_source
from graft.workbench.discover.subgraph import literals_of, made_up_inputs, run_in_float64
from graft.workbench.scaffold.body import USUAL, Body
from graft.workbench.scaffold.names import op_name
from graft.workbench.scaffold.op import LINE

# Two sizes for each letter: source that is the same for both does not depend on them.
SIZES = tuple({c: base + 2 * i for i, c in enumerate("abcdefghijklmnopqrstuvwxyz")} for base in (6, 68))
# Candidates are what a whole pipeline left: their transform comes last, ahead of what only orders the calls.
STAGE, BEFORE = "schedule", ("schedule_streams",)


@dataclass(frozen=True)
class Seed:
    """What a transform is made from. existing: (where, symbol, transforms) of the kernels that compute it."""

    id: str
    model: str
    title: str
    count: int
    source: str
    shapes: Mapping[str, str]
    existing: tuple[tuple[str, str, tuple[str, ...]], ...]

    def function(self) -> Callable[..., Any]:
        space: dict[str, Any] = {}
        exec(compile(self.source, f"<candidate {self.id}>", "exec"), space)
        return space[re.findall(r"^def (\w+)", self.source, re.MULTILINE)[0]]

    def bare(self, name: str) -> str:
        """The function alone, under another name, with where it was found."""
        lines = self.source[self.source.index("def ") :].rstrip().split("\n")
        lines[0] = re.sub(r"^def \w+", f"def {name}", lines[0])
        lines[1] = f'    """{self.title}: found {times(self.count)} in {self.model}."""'
        return wrapped("\n".join(lines))


def wrapped(source: str) -> str:
    """Calls and signatures that are longer than a line, with their arguments on a line of their own."""
    lines = []
    for line in source.split("\n"):
        found = re.fullmatch(r"(\s*)(.*?\()(.*)(\).*)", line) if len(line) > LINE else None
        if found is None:
            lines.append(line)
        else:
            space, head, inner, tail = found.groups()
            lines += [f"{space}{head}", f"{space}    {inner}", f"{space}{tail}"]
    return "\n".join(lines)


def times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def seed_of(candidate: Candidate, model: str) -> Seed:
    return seed_from(candidate.to_dict(), model)


def seed_from(data: Mapping[str, Any], model: str) -> Seed:
    """From an entry of `graft discover --json`. One that cannot be a pattern is an error with the reason."""
    pattern = data["pattern"]
    if pattern["problem"]:
        raise PatternError(f"candidate {data['id']} ({data['title']}) cannot be a pattern: {pattern['problem']}")
    existing = tuple((e["where"], e["symbol"], tuple(e["transforms"])) for e in data["existing"])
    source, shapes = data["reference"], dict(pattern["shapes"])
    return Seed(data["id"], model, data["title"], data["count"], source, shapes, existing)


def read_seed(reference: str, found: Callable[[], Discovery] | None) -> Seed:
    """`ID`, looked up in what `found` discovers, or `FILE.json:ID` of a saved `graft discover --json`."""
    path, colon, name = reference.rpartition(":")
    if not colon:
        if found is None:
            raise UsageError(
                f"--from {reference}: say where it was found, with --model MODEL or DUMPS, or write"
                " FILE.json:ID (graft discover MODEL --json > FILE.json)"
            )
        discovery = found()
        return seed_of(discovery.find(reference), discovery.model)
    if found is not None:
        raise UsageError(f"--from {reference} names a file already; leave out --model")
    try:
        data = json.loads(Path(path).read_text())
        entries = {entry["id"]: entry for entry in data["candidates"]}
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; graft discover MODEL --json writes it") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not what graft discover MODEL --json writes; write it anew") from error
    near = [key for key in entries if name and key.startswith(name)]
    if len(near) != 1:
        raise UnknownCandidate(name, entries)
    try:
        return seed_from(entries[near[0]], data["model"])
    except (KeyError, TypeError) as error:
        raise ShapesUnknown(f"candidate {near[0]} of {path} ({error})") from error


def body_of_seed(seed: Seed, name: str, op: bool) -> tuple[Body, str]:
    """The body, and what to know about it. A kernel that exists takes the place of the pattern, unless `op`."""
    pattern = seed.bare(f"{op_name(name)}_by_hand")
    wrong = several_wrong(seed, f"{op_name(name)}_by_hand")
    if op or not seed.existing:
        return Body(pattern, None, USUAL, seed.shapes, wrong), ""
    replacement, note = existing_call(seed, f"{op_name(name)}_by_kernel")
    return Body(pattern, replacement, USUAL, seed.shapes, wrong), note


def several_wrong(seed: Seed, pattern: str) -> str:
    """What the tests take for nearly right, where there are several results; '' where there is one."""
    if "-> tuple[" not in seed.source:
        return ""
    return f"tuple(t * 1.25 + 0.25 for t in {pattern}({', '.join(seed.shapes)}))"


# ── kernels that are there ──────────────────────────────────────────────────────────────────────────────────────


def existing_call(seed: Seed, name: str) -> tuple[str, str]:
    """Source of the same function by a kernel that exists, and a note; an error says why none can be filled in."""
    problems = []
    for where, symbol, transforms in seed.existing:
        fill = {"graft": graft_call, "aten": aten_call, "installed": aten_call}.get(where)
        try:
            sources = [fill(seed, symbol, name, sizes) for sizes in SIZES] if fill else []
        except GraftError as error:
            problems.append(f"{symbol}: {error}")
            continue
        if sources and sources[0] == sources[1]:
            verb = "does" if len(transforms) == 1 else "do"
            done = f"{' and '.join(transforms)} {verb} this already (graft explain)" if transforms else ""
            return sources[0], done
        problems.append(f"{symbol}: {'its arguments follow from sizes' if sources else 'a pattern, not a kernel'}")
    raise UsageError(
        f"candidate {seed.id}: no call of an existing kernel could be filled in ({'; '.join(problems)});"
        " pass --op to make an op of its own instead"
    )


def graft_call(seed: Seed, symbol: str, name: str, sizes: Mapping[str, int]) -> str:
    found = look_in_graft(traced(seed, seed.function(), sizes))
    if symbol not in [existing.symbol for existing in found.found]:
        raise PatternError("graft's transforms do not make it of these calls alone")
    return bare_source(found.rewritten, name)


def aten_call(seed: Seed, symbol: str, name: str, sizes: Mapping[str, int]) -> str:
    """The order of the tensors and the numbers are those that give the same values."""
    gm = traced(seed, seed.function(), sizes)
    values = made_up_inputs(gm)
    if values is None:
        raise PatternError("its inputs are too large to be compared")
    (wanted,) = run_in_float64(gm, values)
    for known in (*aten_kernels(), *installed_kernels()):
        if known.symbol == symbol and known.tensors == len(values):
            found = filling(known, values, literals_of(gm), wanted)
            if found is not None:
                order, numbers = found
                call = known.call

                def by_kernel(*given: Any, call: Any = call, order: Any = order, numbers: Any = numbers) -> Any:
                    return call(*(given[index] for index in order), *numbers)

                return bare_source(traced(seed, by_kernel, sizes), name)
    raise PatternError("it takes its inputs in another layout")


def traced(seed: Seed, function: Callable[..., Any], sizes: Mapping[str, int]) -> GraphModule:
    """The function with inputs of these sizes, as a module whose inputs have the seed's names."""
    tensors = tuple(
        torch.zeros([size_of(d, sizes) for d in shape.partition(":")[0].split()], dtype=example_dtype(shape))
        for shape in seed.shapes.values()
    )
    made = trace_function(function, tensors).graph
    graph, copies = Graph(), {}
    for node, name in zip(placeholders(made), seed.shapes, strict=True):
        copies[node] = graph.placeholder(name)
        copies[node].meta = dict(node.meta) | ({"weight": True} if name.startswith("weight") else {})
    for node in made.nodes:
        if node.op == "call_function":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(torch.fx.map_arg(output_node(made).args[0], copies.__getitem__))
    return GraphModule(torch.nn.Module(), graph)


def bare_source(gm: GraphModule, name: str) -> str:
    source = function_source(gm, name)
    return wrapped(source[source.index("def ") :].rstrip())
