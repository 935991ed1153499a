"""A pattern as a program over rows: what one kernel does to the last dim of its tensors, block by block.

A value is a function of the column, so that slices and concatenations are other columns and no work. Every reduction
is a loop over its row; what has one number a row is computed once; results are stored by a loop for each stretch of
columns. Inputs are read again by each loop: a row stays in the first-level cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from torch.fx import Graph, GraphModule, Node

from graft.ir.io.text import target_text
from graft.ir.nodes import calls, is_op, output_node, placeholders, tensor_of, tensor_val, where
from graft.ir.patterns.arguments import WORKING_DTYPE, size_of
from graft.ir.trace import trace_function
from graft.passes.elementwise import PointwiseStep, steps_of
from graft.passes.patterns import Rewrite
from graft.workbench.scaffold.body import Body, literals_of, tensor_arguments
from graft.workbench.scaffold.inline import inlined
from graft.workbench.scaffold.kernel import FIRST, SECOND, KernelLanguage, expression, table_helper

aten = torch.ops.aten
Reduction = Literal["sum", "mean", "amax", "amin"]
REDUCTIONS: dict[Any, Reduction] = {
    aten.sum.dim_IntList: "sum", aten.mean.dim: "mean", aten.amax.default: "amax", aten.amin.default: "amin",
}  # fmt: skip
CASTS = (aten.to.dtype, aten._to_copy.default, aten.contiguous.default)
PRIMES = (31, 37, 41, 43, 47, 53, 59, 61)  # a size for each letter: no two are alike, and no pattern names them
WIDE_PRIMES = (20011, 20021, 20023, 20029, 20047, 20051, 20063, 20071)  # and wide rows: nothing is cut off there
MOST_DIMS = 4


@dataclass(frozen=True)
class RowInput:
    """A tensor that is read row by row, or a `vector` that every row reads. width: columns; a letter for any. wide:
    declared float32, whatever dtype the model computes in."""

    name: str
    vector: bool
    width: int | str
    wide: bool = False


@dataclass(frozen=True)
class Stretch:
    """Columns from `first` to before `last`; the lines that compute there, and what comes out of them."""

    first: int | str
    last: int | str
    lines: tuple[tuple[str, str], ...]  # a name and what it is
    results: tuple[str, ...]


@dataclass(frozen=True)
class RowBlock:
    """A reduction, which gives `names[0]`; one number a row (`scalar`); or results that are stored."""

    kind: Reduction | Literal["scalar", "store"]
    names: tuple[str, ...]
    width: int | str
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True)
class RowOutput:
    name: str
    width: int | str
    wide: bool  # float32 whatever the inputs are


@dataclass(frozen=True)
class RowProgram:
    inputs: tuple[RowInput, ...]
    outputs: tuple[RowOutput, ...]
    blocks: tuple[RowBlock, ...]
    helpers: tuple[str, ...]
    numbers: tuple[str, ...]


class NoRows(Exception):
    """Why a pattern is no program over rows."""


@dataclass(frozen=True)
class RowLanguage:
    """A language of kernels, and how it reads an input at a column."""

    kernel: KernelLanguage
    load: Callable[[RowInput, str], str]


Lines = list[tuple[str, str]]


@dataclass
class RowWriter:
    """Writes the values of one pattern, in one language."""

    graph: Graph
    steps: dict[Node, tuple[list[PointwiseStep], list[PointwiseStep]]]
    inputs: dict[Node, RowInput]
    widths: dict[int, int | str]
    values: list[dict[str, float]]
    language: RowLanguage
    scalars: dict[Node, str] = field(default_factory=dict)
    helpers: set[str] = field(default_factory=set)

    def width(self, node: Node) -> int | str:
        size = last_size(node)
        return self.widths.get(size, size)

    def columns(self, node: Node, offset: int = 0) -> list[int]:
        """Where the value of a node, read from `offset` on, changes its source."""
        if node.op == "placeholder" or node in self.scalars:
            return []
        if is_op(node, aten.slice.Tensor):
            if isinstance(self.width(sliced(node)), str):  # traced at one size, it would take what it takes there
                raise NoRows(f"{where(node)} takes a part of a row whose width is not known")
            return self.columns(sliced(node), offset + start_of(node))
        if is_op(node, aten.cat.default):
            found = []
            for part, first, last in self.parts(node):
                found += [first - offset, last - offset, *self.columns(part, offset - first)]
            return found
        return [at for source in sources(node) for at in self.columns(source, offset)]

    def parts(self, node: Node) -> list[tuple[Node, int, int]]:
        found, at = [], 0
        for part in node.args[0]:  # pyrefly: ignore
            width = self.width(part)
            if isinstance(width, str):
                raise NoRows("it puts parts together whose width is not known")
            found.append((part, at, at + width))
            at += width
        return found

    def value(self, node: Node, offset: int, first: int | str, lines: Lines, known: dict[Any, str]) -> str:
        """The name of a node's value in column `i + offset` of a stretch that begins at `first`."""
        if node in self.scalars:
            return self.scalars[node]
        if self.width(node) == 1:
            offset = 0
        key = (node, offset)
        if key not in known:
            text = self.text(node, offset, first, lines, known)
            known[key] = text if text.isidentifier() else named(text, lines)
        return known[key]

    def text(self, node: Node, offset: int, first: int | str, lines: Lines, known: dict[Any, str]) -> str:
        if node in self.inputs:
            at = "0" if self.width(node) == 1 else f"i{offset:+d}" if offset else "i"
            return self.language.load(self.inputs[node], at)
        if is_op(node, *CASTS):
            return self.value(node.args[0], offset, first, lines, known)  # pyrefly: ignore
        if is_op(node, aten.slice.Tensor):
            return self.value(sliced(node), offset + start_of(node), first, lines, known)
        if is_op(node, aten.cat.default):
            at = int(first) + offset
            part, begin, _ = next(one for one in self.parts(node) if one[1] <= at < one[2])
            return self.value(part, offset - begin, first, lines, known)
        found: dict[Node, str] = {n: self.value(n, offset, first, lines, known) for n in sources(node)}
        steps, others = self.steps[node]
        own: list[str] = []
        for step, other in zip(steps, others, strict=True):
            text = expression(step, other, found, own, self.values, self.language.kernel)
            if text is None:
                raise NoRows(f"{step.op} at {step.args} has no expression in {self.language.kernel.title} here")
            self.helpers |= table_helper(step.op)
            own.append(named(text, lines))
        return own[-1]

    def stretches(self, nodes: tuple[Node, ...], width: int | str) -> tuple[Stretch, ...]:
        cuts = sorted({at for node in nodes for at in self.columns(node)})
        if isinstance(width, int):
            edges: list[int | str] = [0, *(at for at in cuts if 0 < at < width), width]
        elif cuts:
            raise NoRows("it puts parts together in a row whose width is not known")
        else:
            edges = [0, width]
        made = []
        for first, last in pairwise(edges):
            lines: Lines = []
            known: dict[Any, str] = {}
            results = tuple(self.value(node, 0, first, lines, known) for node in nodes)
            made.append(Stretch(first, last, tuple(lines), results))
        return tuple(made)

    def blocks(self) -> list[RowBlock]:
        found = []
        for node in calls(self.graph):
            if node.target in REDUCTIONS:
                source: Node = node.args[0]  # pyrefly: ignore
                name, width = f"s{len(found)}", self.width(source)
                block = RowBlock(REDUCTIONS[node.target], (name,), width, self.stretches((source,), width))
            elif self.width(node) == 1 and self.alone(node):
                name = f"s{len(found)}"
                block = RowBlock("scalar", (name,), 1, self.stretches((node,), 1))
            else:
                continue
            self.scalars[node] = name
            found.append(block)
        return found

    def alone(self, node: Node) -> bool:
        """Of numbers that a row has one of."""
        if is_op(node, aten.slice.Tensor, aten.cat.default):
            raise NoRows(f"{where(node)} takes a single column")
        return all(self.width(source) == 1 for source in sources(node))


def named(text: str, lines: Lines) -> str:
    lines.append((f"t{len(lines)}", text))
    return lines[-1][0]


def last_size(node: Node) -> int:
    """Columns; a single number has one."""
    shape = tensor_of(node).shape
    return int(shape[-1]) if len(shape) else 1


def sources(node: Node) -> list[Node]:
    return [source for source in node.all_input_nodes if tensor_val(source) is not None]


def sliced(node: Node) -> Node:
    return node.args[0]  # pyrefly: ignore


def start_of(node: Node) -> int:
    _, dim, start, _, step = (*node.args, None, None, None, None, 1)[:5] if len(node.args) < 5 else node.args
    rank = tensor_of(sliced(node)).dim()
    if not isinstance(dim, int) or dim % rank != rank - 1 or step not in (None, 1):
        raise NoRows(f"{where(node)} takes a part of the rows, or every n-th number")
    width = int(tensor_of(sliced(node)).shape[-1])
    begin = int(start or 0)
    return begin if begin >= 0 else begin + width


def row_program(body: Body, rewrite: Rewrite, language: RowLanguage) -> RowProgram | str:
    """The pattern over rows, or why it is none."""
    try:
        return written_program(body, rewrite, language)
    except NoRows as reason:
        return str(reason)


def written_program(body: Body, rewrite: Rewrite, language: RowLanguage) -> RowProgram:
    names = list(literals_of(body.pattern))
    if any(isinstance(value, int) for value in literals_of(body.pattern).values()):
        raise NoRows("it takes whole numbers, which may be sizes")
    letters = sorted({c for shape in body.shapes.values() for c in shape.partition(":")[0] if c.isalpha()})
    if len(letters) > len(PRIMES) or any(not p.isalnum() for s in body.shapes.values() for p in dims(s)):
        raise NoRows("its sizes follow from others")
    sizes = dict(zip(letters, PRIMES, strict=False))
    values = [{name: base * (i + 1) for i, name in enumerate(names)} for base in (FIRST, SECOND)]
    graphs = [traced(body, rewrite, literals, sizes) for literals in values]
    widths = {dims(shape)[-1] for shape in body.shapes.values() if dims(shape)}
    wide = {c: WIDE_PRIMES[i] if c in widths else 2 + i for i, c in enumerate(letters)}
    shown = [[node.target for node in calls(graph)] for graph in (graphs[0], traced(body, rewrite, values[0], wide))]
    if shown[0] != shown[1]:  # x[..., :2000] is all of a narrow row
        raise NoRows("it does something else with wide rows than with narrow ones")
    inputs = read_inputs(graphs[0], body, sizes)
    steps = pointwise_steps(*graphs)
    writer = RowWriter(graphs[0], steps, inputs, {size: c for c, size in sizes.items()}, values, language)
    results = returned_nodes(graphs[0])
    check_shapes(graphs[0], inputs, results)
    blocks = writer.blocks()
    out = output_name([*(given.name for given in inputs.values()), *names])
    outputs = tuple(
        RowOutput(
            out if len(results) == 1 else f"{out}{i}", writer.width(node), tensor_of(node).dtype is torch.float32
        )
        for i, node in enumerate(results)
    )
    if all(given.wide for given in inputs.values()) and not all(output.wide for output in outputs):
        raise NoRows("it returns 16 bits, and none of its inputs says which")
    for width in dict.fromkeys(output.width for output in outputs):
        chosen = [i for i, output in enumerate(outputs) if output.width == width]
        stored = tuple(results[i] for i in chosen)
        stretches = writer.stretches(stored, width)
        blocks.append(RowBlock("store", tuple(outputs[i].name for i in chosen), width, stretches))
    return RowProgram(tuple(inputs.values()), outputs, tuple(blocks), tuple(sorted(writer.helpers)), tuple(names))


def dims(shape: str) -> list[str]:
    return shape.partition(":")[0].split()


def traced(body: Body, rewrite: Rewrite, literals: dict[str, float], sizes: dict[str, int]) -> Graph:
    """In 16 bits where nothing else is said, so that what is wide shows; ops of several steps are taken apart."""
    tensors = []
    for name in tensor_arguments(body.pattern):
        wide = body.shapes[name].partition(":")[2].strip()
        dtype = getattr(torch, wide) if wide else WORKING_DTYPE
        if not dtype.is_floating_point:
            raise NoRows("it takes tensors of whole numbers")
        tensors.append(torch.zeros([size_of(dim, sizes) for dim in dims(body.shapes[name])], dtype=dtype))
    pattern: Callable[..., Any] = rewrite.pattern
    try:
        gm: GraphModule = trace_function(lambda *args: pattern(*args, **literals), tuple(tensors))
    except (RuntimeError, ValueError, TypeError) as error:  # halves of an odd width, say
        told = str(error).strip().splitlines()
        raise NoRows(f"it does not run at sizes of any kind: {told[0] if told else type(error).__name__}") from error
    return inlined(gm).graph


def read_inputs(graph: Graph, body: Body, sizes: dict[str, int]) -> dict[Node, RowInput]:
    letters = {size: letter for letter, size in sizes.items()}
    found = {}
    rank = max(tensor_of(node).dim() for node in placeholders(graph))
    if not 2 <= rank <= MOST_DIMS:
        raise NoRows(f"its tensors have {rank} dims; rows are of two to {MOST_DIMS}")
    for node, name in zip(placeholders(graph), tensor_arguments(body.pattern), strict=True):
        found[node] = read_input(node, name, rank, letters)
    return found


def read_input(node: Node, name: str, rank: int, letters: dict[int, str]) -> RowInput:
    shape = tensor_of(node).shape
    if len(shape) not in (0, 1, rank):
        raise NoRows(f"{name} has {len(shape)} dims beside {rank}")
    width = last_size(node)
    wide = tensor_of(node).dtype is not WORKING_DTYPE
    return RowInput(name, len(shape) < 2, letters.get(width, width), wide)


def pointwise_steps(first: Graph, second: Graph) -> dict[Node, tuple[list[PointwiseStep], list[PointwiseStep]]]:
    found = {}
    for node, other in zip(calls(first), calls(second), strict=True):
        if is_op(node, *CASTS) and tensor_of(node).dtype not in (WORKING_DTYPE, torch.float32):
            raise NoRows(f"{where(node)} casts to {tensor_of(node).dtype}, which rows are not computed in")
        if is_op(node, *CASTS, aten.slice.Tensor, aten.cat.default):
            continue
        if node.target in REDUCTIONS:
            given, keep = (*node.args, None, False)[1:3]
            if given not in ([-1], -1) or not (keep is True or node.kwargs.get("keepdim") is True):
                raise NoRows(f"{where(node)} reduces other dims than the last, or drops it")
            continue
        steps, others = steps_of(node), steps_of(other)
        if isinstance(steps, str) or isinstance(others, str):
            raise NoRows(steps if isinstance(steps, str) else str(others))
        found[node] = (steps, others)
    return found


def output_name(given: Iterable[str]) -> str:
    """Of what is written, beside arguments of these names."""
    return "result" if any(name.startswith("out") for name in given) else "out"


def check_shapes(graph: Graph, inputs: dict[Node, RowInput], results: tuple[Node, ...]) -> None:
    """Every row of a result is made of one row of each input."""
    lead = torch.broadcast_shapes(*(tensor_of(n).shape[:-1] for n, given in inputs.items() if not given.vector))
    if any(tensor_of(node).shape[:-1] != lead for node in results):
        raise NoRows("its results have other rows than its inputs")
    for node in calls(graph):
        wide = {last_size(n) for n in sources(node)} - {1}
        made = last_size(node)
        plain = not is_op(node, aten.slice.Tensor, aten.cat.default) and node.target not in REDUCTIONS
        if plain and (len(wide) > 1 or (wide and made not in wide)):
            raise NoRows(f"{where(node)} ({target_text(node.target)}) reads rows of different widths")


def returned_nodes(graph: Graph) -> tuple[Node, ...]:
    given = output_node(graph).args[0]
    nodes = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    if any(not isinstance(node, Node) or node.op == "placeholder" for node in nodes):
        raise NoRows("it returns one of its inputs")
    return nodes  # pyrefly: ignore
