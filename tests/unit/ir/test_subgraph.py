"""Parts of graphs: their borders, all that is behind a value, and the part as a module that computes the same."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Interpreter

from graft.ir.nodes import calls
from graft.ir.subgraph import Cutter, inputs_of, outputs_of, reached
from graft.ir.trace import trace_function
from marks import examples

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def chain(x):
    a = x.exp()
    b = a * 2.0
    c = b + a
    return c.tanh(), b


GRAPH = trace_function(chain, (X,)).graph
EXP, MUL, ADD, TANH = calls(GRAPH)


def test_borders():
    assert inputs_of([MUL, ADD]) == [EXP] and outputs_of([MUL, ADD]) == [MUL, ADD]
    assert inputs_of([EXP, MUL, ADD, TANH]) == [next(iter(GRAPH.nodes))]
    assert outputs_of([EXP, MUL, ADD, TANH]) == [MUL, TANH]


def test_what_is_behind_a_value_ends_at_its_border():
    everything = reached([TANH], lambda node: node.all_input_nodes)
    assert everything == {next(iter(GRAPH.nodes)), EXP, MUL, ADD, TANH}
    assert reached([TANH], lambda node: [] if node is MUL else node.all_input_nodes) >= {MUL, EXP}
    assert reached([ADD], lambda node: node.all_input_nodes if node is ADD else []) == {ADD, MUL, EXP}


def cut(nodes):
    cutter = Cutter()
    for index, node in enumerate(inputs_of(nodes)):
        cutter.input(f"x{index}", {"val": node.meta["val"]}, node)
    for node in nodes:
        cutter.call(node)
    return cutter.module(outputs_of(nodes))


class Noting(Interpreter):
    """Keeps the value of every node."""

    def run_node(self, n):
        self.seen = getattr(self, "seen", {})
        self.seen[n] = super().run_node(n)
        return self.seen[n]


def random_function(program):
    def run(x):
        values = [x]
        for op, left, right in program:
            a, b = values[left % len(values)], values[right % len(values)]
            values.append((a.tanh(), a * b, a + b, a @ b.t() @ b)[op])
        return values[-1]

    return run


PROGRAMS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=8)


@settings(deadline=None, max_examples=examples(25))
@given(PROGRAMS, st.integers(0, 9), st.integers(1, 9))
def test_a_part_computes_what_it_computed_in_the_whole(program, first, count):
    gm = trace_function(random_function(program), (X,))
    interpreter = Noting(gm)
    interpreter.run(X)
    nodes = list(calls(gm.graph))
    nodes = nodes[first % len(nodes) :][:count]
    part = cut(nodes)
    found = part(*(interpreter.seen[node] for node in inputs_of(nodes)))
    wanted = [interpreter.seen[node] for node in outputs_of(nodes)]
    found = [found] if len(wanted) == 1 else list(found)
    assert len(found) == len(wanted) and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert [node.name for node in calls(part.graph)] == [node.name for node in nodes]
    part.graph.lint()


def test_arguments_may_become_numbers():
    cutter = Cutter()
    cutter.input("x", {}, EXP)
    made = cutter.call(MUL, lambda given: tuple(3.0 if item == 2.0 else item for item in given) if given else given)
    assert made.args[1] == 3.0 and torch.equal(cutter.module([MUL])(X), X * 3.0)
