"""Generates graphs that a rewrite must leave alone, or may only take where the numbers stay the same.

    for case in negatives(rewrite):
        assert_refused_or_harmless(transform, case)

Each is the traced pattern with one change: a second reader, a result more, another dim, another dtype, a dropout, a
computed weight, a broadcast argument. Readers of a cast of an input, which may have others, are a kind of their own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node

from graft.ir.canonical.normal_form import canonicalize
from graft.ir.canonical.rules import DIMS
from graft.ir.edit import AbstractCalls, fake_mode
from graft.ir.io.text import graph_text
from graft.ir.nodes import calls, output_node, placeholders, tensor_of, tensor_val
from graft.ir.patterns.arguments import literal_names, size_of, tensor_names
from graft.ir.patterns.match import is_cast_of
from graft.ir.patterns.words import Path, deciding
from graft.ir.trace import quiet, trace_function
from graft.passes.base import Context
from graft.passes.patterns import PatternTransform, Rewrite
from graft.passes.pipeline import run_one
from graft.passes.report import TransformRecord
from graft.testing.failure import failure, graph_lines, match_lines, miss_lines
from graft.testing.numbers import compare

aten = torch.ops.aten
WEIGHTS = ("weight", "bias")  # how the names of such arguments begin
DROPOUT = (aten.dropout.default, 0.5, True)
SIZE = 8  # one size for all letters: another dim then often still gives a graph that runs


@dataclass(frozen=True)
class Negative:
    """A graph and the tensors it takes. kind: what was changed; at: where, a node (%name) or an argument."""

    name: str
    module: GraphModule
    args: tuple[Tensor, ...]
    kind: str
    at: str = ""

    def run(self) -> list[Tensor]:
        """What the graph gives; random numbers start from one seed."""
        torch.manual_seed(0)
        with torch.no_grad():
            results = Interpreter(self.module).run(*self.args)
        return list(results) if isinstance(results, (list, tuple)) else [results]


def variants(rewrite: Rewrite) -> list[Path]:
    """Every way to decide the words of the pattern; one where it has none."""
    tensors, found, following = examples(rewrite, torch.bfloat16), [], ()
    while following is not None:
        with torch.no_grad(), deciding(Path(following)) as path:
            rewrite.pattern(**tensors, **literals(rewrite))
        following = path.following()
        found.append(path)
    return found


def positive(rewrite: Rewrite, dtype: torch.dtype = torch.bfloat16, path: Path | None = None) -> Negative:
    """The pattern itself, or one of its variants, which must match."""
    tensors = examples(rewrite, dtype)
    with deciding(Path(path.whole if path else ())):
        gm = trace_function(
            lambda *args: rewrite.pattern(**dict(zip(tensors, args, strict=True)), **literals(rewrite)),
            tuple(tensors.values()),
        )
    inputs = placeholders(gm.graph)
    for name, node in zip(tensors, inputs, strict=True):
        node.meta["pattern_input"] = name
        node.meta["weight"] = name.startswith(WEIGHTS)
    return Negative(rewrite.pattern.__name__, gm, tuple(tensors.values()), "positive")


def examples(rewrite: Rewrite, dtype: torch.dtype) -> dict[str, Tensor]:
    """A tensor for each argument, in the order that the pattern takes them."""
    generator = torch.Generator().manual_seed(0)
    sizes: dict[str, int] = dict.fromkeys("abcdefghijklmnopqrstuvwxyz", SIZE)
    made = {}
    for name in tensor_names(rewrite.pattern):
        dims, _, wide = rewrite.shapes[name].partition(":")
        shape = [size_of(dim, sizes) for dim in dims.split()]
        made[name] = example(shape, getattr(torch, wide.strip()) if wide else dtype, generator)
    return made


def example(shape: list[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Whole numbers may be indices: they are below every size."""
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else SIZE, shape, generator=generator).to(dtype)


def literals(rewrite: Rewrite) -> dict[str, int | float]:
    return {name: literal_of(rewrite.pattern, name) for name in literal_names(rewrite.pattern)}


def literal_of(function: Callable[..., Any], name: str) -> int | float:
    known = {"int": 2, "bool": True}
    return known.get(str(function.__annotations__[name]).removeprefix("<class '").removesuffix("'>"), 0.25)


def negatives(rewrite: Rewrite, path: Path | None = None) -> list[Negative]:
    """Every generated graph for one rewrite, or for a variant of it; those that cannot run left out."""
    base, abstract = positive(rewrite, path=path), AbstractCalls()
    made = [mutate(base, abstract, *change) for change in changes(base.module.graph)]
    return [case for case in made if case is not None]


def assert_refused_or_harmless(transform: PatternTransform, case: Negative) -> TransformRecord:
    """Refused with a reason and the graph as it was; or fused, and the numbers stay (exact patterns: every bit)."""
    __tracebackhide__ = True
    text, expected = graph_text(case.module.graph), case.run()
    settings = replace(transform.config, enabled=True)
    record = run_one(case.module, transform, settings, Context())  # the pipeline, without its recompiling
    after = graph_text(case.module.graph)
    if not record.matches:
        if not record.reason or after != text:
            raise failure(
                f"{case.name}: {transform.name} refuses it with a reason, and the graph stays as it was",
                "refused, and yet the graph changed" if after != text else "refused without a reason",
                [*miss_lines(record.near_misses), *graph_lines(after)],
                advice="give Outcome a reason; change the graph only through Editor, with a match for each change",
            )
        return record
    exact = {rewrite.pattern.__name__: rewrite.exact for rewrite in transform.rewrites()}
    roundings = 0 if all(exact[match.pattern.split()[0]] for match in record.matches) else 2
    share, problem = compare(case.run(), expected, roundings)
    if share > min(roundings, 1):
        raise failure(
            f"{case.name}: {transform.name} refuses it, or gives the same numbers",
            f"it fused, and the graph gives {problem}",
            [*match_lines(record), *graph_lines(text)],
            advice="refuse this site in the rewrite's `check`, with a reason",
        )
    return record


Change = Callable[[dict[Node, Node], list[Tensor]], None]


def mutate(base: Negative, abstract: AbstractCalls, kind: str, at: str, change: Change) -> Negative | None:
    """A copy of `base` with one change; None where the changed graph does not run."""
    graph, copies = Graph(), {}
    for node in base.module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = copy.copy(node.meta)
    args = list(base.args)
    change(copies, args)
    try:
        with quiet("torch._subclasses.fake_tensor"):
            for node in calls(graph):
                node.meta["val"] = abstract(node)
        gm = GraphModule(nn.Module(), graph)
        canonicalize(gm)
        case = Negative(f"{base.name}: {kind} {at}", gm, tuple(args), kind, at)
        case.run()
    except (RuntimeError, IndexError, ValueError, TypeError, AssertionError):  # torch asserts, too
        return None  # shapes or dtypes that no op of the graph accepts: such a model does not exist
    return case


def changes(graph: Graph) -> Iterator[tuple[str, str, Change]]:
    """(kind, where, what to do with a copy)."""
    returned = set(output_node(graph).all_input_nodes)
    inner = [n for n in graph.nodes if n.op == "call_function" and n not in returned and tensor_val(n) is not None]
    inputs = placeholders(graph)
    for node in inner:
        read, given = ("cast read", "cast returned") if is_cast_of(node, inputs) else ("second reader", "returned")
        yield read, f"%{node.name}", lambda copies, _, n=node: add_result(copies[n], read=True)
        yield given, f"%{node.name}", lambda copies, _, n=node: add_result(copies[n], read=False)
        if tensor_of(node).is_floating_point():
            yield "dropout", f"%{node.name}", lambda copies, _, n=node: insert(copies[n], *DROPOUT)
    for node in graph.nodes:
        for position in DIMS.get(node.target, ()):
            yield "dim", f"%{node.name}", lambda copies, _, n=node, p=position: change_dim(copies[n], p)
    yield from argument_changes(graph)


def argument_changes(graph: Graph) -> Iterator[tuple[str, str, Change]]:
    inputs = placeholders(graph)
    for index, node in enumerate(inputs):
        name, tensor = node.meta["pattern_input"], tensor_of(node)
        others = [i for i in range(len(inputs)) if i != index]
        if tensor.is_floating_point() and others:
            yield "dtype", f"{name} wider", lambda c, a, i=index: retype(c, a, inputs, [i])
            yield "dtype", f"{name} narrower", lambda c, a, o=others: retype(c, a, inputs, o)
        if node.meta["weight"]:
            yield "computed weight", name, lambda copies, _, n=node: insert(copies[n], aten.mul.Tensor, 1.5)
        shared = sum(tensor_of(other).dim() >= tensor.dim() for other in inputs) > 1  # else nothing to be spread over
        for dim in ({0, tensor.dim() - 1} if shared else {tensor.dim() - 1}) if tensor.dim() else ():
            if tensor.shape[dim] != 1:
                yield "broadcast", f"{name} dim {dim}", lambda c, a, i=index, d=dim: flatten_dim(c, a, inputs, i, d)
        if tensor.dim() > 1 and shared:
            yield "broadcast", f"{name} last dim alone", lambda c, a, i=index: last_dim(c, a, inputs, i)


# ── changes ─────────────────────────────────────────────────────────────────────────────────────────────────────


def add_result(node: Node, read: bool) -> None:
    """The graph returns the value too, or something computed from it."""
    output = output_node(node.graph)
    with node.graph.inserting_before(output):
        extra = node.graph.call_function(aten.sin.default, (node,)) if read else node
    given = output.args[0]
    output.args = ((*(given if isinstance(given, (list, tuple)) else (given,)), extra),)


def insert(node: Node, target: Any, *args: Any) -> None:
    """The readers of a value read target(value, *args) instead."""
    with node.graph.inserting_after(node):
        new = node.graph.call_function(target, (node, *args))
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


def change_dim(node: Node, position: int) -> None:
    """-1 becomes -2, any other dim -1."""
    args = list(node.args)
    if position < len(args):
        dim = args[position]
        args[position] = [other_dim(d) for d in dim] if isinstance(dim, (list, tuple)) else other_dim(dim)
        node.args = tuple(args)


def other_dim(dim: int) -> int:
    return -2 if dim == -1 else -1


def retype(copies: dict[Node, Node], args: list[Tensor], inputs: list[Node], which: list[int]) -> None:
    """The chosen arguments become float32, or bfloat16 where they are that."""
    for index in which:
        wide = args[index].dtype == torch.float32
        set_input(copies[inputs[index]], args, index, args[index].to(torch.bfloat16 if wide else torch.float32))


def flatten_dim(copies: dict[Node, Node], args: list[Tensor], inputs: list[Node], index: int, dim: int) -> None:
    set_input(copies[inputs[index]], args, index, args[index].narrow(dim, 0, 1))


def last_dim(copies: dict[Node, Node], args: list[Tensor], inputs: list[Node], index: int) -> None:
    set_input(copies[inputs[index]], args, index, args[index].flatten(0, -2)[0])


def set_input(node: Node, args: list[Tensor], index: int, tensor: Tensor) -> None:
    args[index] = tensor.contiguous()
    mode = fake_mode(node)
    node.meta["val"] = mode.from_tensor(args[index], static_shapes=True)
