"""Embeddings, chosen rows, pointwise chains, and views that a native step hands out, against torch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

from graft.backends.native.ops.pointwise import FORMS
from graft.backends.native.program import Program
from graft.backends.native.regions import split
from graft.ir.edit import RULES
from graft.ops.cases import tolerance
from native_cases import DTYPES, Built, Symbols, compile_all, needs_compiler, poisoned

pytestmark = needs_compiler
aten = torch.ops.aten
ROWS, WIDTH = 7, 24
UNARY = [op for op in FORMS if len(op._schema.arguments) == 1]
BINARY, SCALAR = ([op for op in FORMS if op._overloadname == name] for name in ("Tensor", "Scalar"))


class Sketch:
    """A graph over x and y [1, T, 24], a vector [24] and a table [50, 24], with `input_ids` and `logits_indices`."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.s, self.graph, self.root = Symbols(), Graph(), torch.nn.Module()
        self.tensors: dict[str, torch.Tensor] = {
            "input_ids": torch.randint(0, 50, (1, ROWS), generator=generator),
            "logits_indices": torch.tensor([6, 0, 3]),
            **{name: (torch.rand(1, ROWS, WIDTH, generator=generator) + 0.1).to(dtype) for name in ("x", "y")},
        }
        s = self.s
        shapes = {"input_ids": (s.batch, s.tokens), "logits_indices": (s.sequences,)}
        self.nodes: dict[str, Node] = {}
        for name, tensor in self.tensors.items():
            shape = shapes.get(name, (s.batch, s.tokens, WIDTH))
            self.nodes[name] = self.graph.placeholder(name)
            self.nodes[name].meta["val"] = s.fake(shape, tensor.dtype)
        for name, shape in (("vector", (WIDTH,)), ("number", ()), ("table", (50, WIDTH))):
            tensor = torch.rand(shape, generator=generator).to(dtype)
            self.root.register_buffer(name, tensor)
            self.nodes[name] = self.graph.get_attr(name)
            self.nodes[name].meta["val"] = s.fake(shape, dtype)
            self.tensors[name] = tensor
        self.results: list[Node] = []

    def call(self, op: Any, *args: Any) -> Node:
        node = self.graph.call_function(op, args)
        with self.s.mode:
            node.meta["val"] = RULES.get(op, op)(*(a.meta["val"] if isinstance(a, Node) else a for a in args))
        return node

    def built(self) -> Built:
        self.graph.output((tuple(self.results),))
        inputs = [t for name, t in self.tensors.items() if self.nodes[name].op == "placeholder"]
        return Built(None, GraphModule(self.root, self.graph), inputs)  # pyrefly: ignore


def pointwise(dtype: torch.dtype) -> Built:
    sketch = Sketch(dtype)
    x, y, vector, number = (sketch.nodes[name] for name in ("x", "y", "vector", "number"))
    results = [sketch.call(op, x) for op in UNARY]
    results += [sketch.call(op, x, other) for op in BINARY for other in (y, vector, number, 0.3)]
    results += [sketch.call(op, x, 0.3) for op in SCALAR]
    results += [sketch.call(aten.pow.Tensor_Scalar, x, power) for power in (2, 3.0, 1.5)]
    results.append(sketch.call(aten.gelu.default, x))
    chain = sketch.call(aten.mul.Tensor, sketch.call(aten.tanh.default, sketch.call(aten.div.Tensor, x, 3.0)), 3.0)
    results.append(sketch.call(aten.add.Tensor, chain, y))
    sketch.results = results
    return sketch.built()


def rows(dtype: torch.dtype) -> Built:
    """What comes out in another order than it lies: heads first, a part of each head, chosen rows."""
    sketch = Sketch(dtype)
    embedded = sketch.call(aten.embedding.default, sketch.nodes["table"], sketch.nodes["input_ids"])
    total = sketch.call(aten.add.Tensor, embedded, sketch.nodes["x"])
    s = sketch.s
    heads = sketch.graph.call_function(aten.reshape.default, (total, [1, -1, 4, 6]))
    heads.meta["val"] = s.fake((s.batch, s.tokens, 4, 6), dtype)
    turned = sketch.call(aten.transpose.int, heads, 1, 2)
    part = sketch.call(aten.slice.Tensor, turned, -1, 2, 5)
    chosen = sketch.call(aten.index_select.default, total, 1, sketch.nodes["logits_indices"])
    sketch.results = [embedded, total, turned, part, chosen, sketch.call(aten.slice.Tensor, heads, -2, 1, 3)]
    return sketch.built()


def tied(dtype: torch.dtype) -> Built:
    """An output head over the table of the embedding."""
    sketch = Sketch(dtype)
    embedded = sketch.call(aten.embedding.default, sketch.nodes["table"], sketch.nodes["input_ids"])
    total = sketch.call(aten.add.Tensor, embedded, sketch.nodes["x"])
    sketch.results = [embedded, total, sketch.call(aten.linear.default, total, sketch.nodes["table"])]
    return sketch.built()


def prefix(dtype: torch.dtype) -> Built:
    """The first 20 of 24 columns: rounded up to whole lanes both are 32."""
    sketch = Sketch(dtype)
    total = sketch.call(aten.add.Tensor, sketch.nodes["x"], sketch.nodes["y"])
    sketch.results = [sketch.call(aten.slice.Tensor, total, -1, 0, 20)]
    return sketch.built()


MAKERS = (pointwise, rows, tied, prefix)


def unlike(program: Program) -> Program:
    """Every + of a loop is a -, and rows are chosen from the wrong place."""
    steps = []
    for step in program.steps:
        body = tuple(line.replace(" + ", " - ") for line in step.kernel.body)
        steps.append(replace(step, kernel=replace(step.kernel, body=body)))
    return replace(program, steps=tuple(steps))


@cache
def compiled() -> tuple[list[Built], list[Built]]:
    graphs = [make(dtype) for dtype in DTYPES for make in MAKERS]
    return compile_all([*graphs, *graphs], [*[None] * len(graphs), *[unlike] * len(graphs)], len(graphs))


def wanted(built: Built, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The graph in float64."""
    gm = GraphModule(built.gm, built.gm.graph).to(torch.float64)
    named = dict(zip(built.run.program.inputs, inputs, strict=True))
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    given = [named.get(name, torch.zeros(1)) for name in names]
    return list(gm(*(t.double() if t.is_floating_point() else t for t in given))[0])


def off(built: Built, dtype: torch.dtype) -> list[int]:
    """Which results are not what torch gives in float64."""
    bound = tolerance(dtype, 8)
    right = wanted(built, built.inputs)
    made = built.run(*built.inputs)
    shapes = [(a.shape, a.dtype) for a in made]
    assert shapes == [(b.shape, dtype) for b in right]
    return [
        i for i, (a, b) in enumerate(zip(made, right, strict=True)) if not torch.allclose(a.double(), b, bound, bound)
    ]


@pytest.mark.parametrize(
    "index", range(len(DTYPES) * len(MAKERS)), ids=lambda i: f"{MAKERS[i % 4].__name__}-{DTYPES[i // 4]}"
)
def test_rows_and_chains_agree_with_torch_and_wrong_ones_do_not(index, monkeypatch):
    monkeypatch.setattr("graft.backends.native.call.fresh", poisoned)
    torch.manual_seed(0)
    right, wrong = compiled()
    dtype = DTYPES[index // len(MAKERS)]
    assert off(right[index], dtype) == []
    assert off(wrong[index], dtype)


@pytest.mark.parametrize("place", range(len(DTYPES)))
def test_a_tied_table_stands_there_once(place):
    """And rows that are read out of the head's tiles are the table's, bit by bit."""
    built = compiled()[0][len(MAKERS) * place + MAKERS.index(tied)]
    assert [weight.target for weight in built.run.program.weights] == ["table"]
    (embedded, _, _), named = built.run(*built.inputs), dict(zip(built.run.program.inputs, built.inputs, strict=True))
    assert torch.equal(embedded, built.gm.table[named["input_ids"]])


def test_a_chain_is_one_loop():
    program = compiled()[0][0].run.program
    loop = program.steps[-1].kernel.body
    assert any("plain_tanh((r_x_x[i] / 3.0f))" in line for line in loop), loop


@pytest.mark.parametrize(("columns", "whole"), [(20, False), (24, True)])
def test_a_step_fills_a_result_only_where_it_writes_no_more_than_that(columns, whole):
    """Its rows lie side by side there: a wider row would end in the next one, the last behind the tensor."""
    sketch = Sketch(torch.float32)
    total = sketch.call(aten.add.Tensor, sketch.nodes["x"], sketch.nodes["y"])
    sketch.results = [sketch.call(aten.slice.Tensor, total, -1, 0, columns)]
    (region,) = split(sketch.built().gm, {}).regions
    location = region.program.locations["add_tensor"]
    assert (location.output is not None) == whole
