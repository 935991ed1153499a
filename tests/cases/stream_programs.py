"""Small programs on several streams, drawn by hypothesis, and every way in which a device may run them.

The second half knows nothing of vector clocks, hazards or alias analysis: it lets every stream go on whenever it may,
in all interleavings, with an allocator that gives free memory away as soon as it can.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch.fx import Graph, GraphModule, Node

from graft.ir.nodes import output_node
from graft.ir.streams import stream_op
from graft.ops.streams import RECORD, WAIT
from graft.passes.library.streams.emit import apply_schedule
from graft.passes.library.streams.schedule import Schedule, ScheduledCall

aten = torch.ops.aten
ROWS = 2


@dataclass
class Program:
    """A graph over two buffers of two rows, and which rows of whose memory each node is."""

    graph: Graph = field(default_factory=Graph)
    cells: dict[Node, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    ops: list[Node] = field(default_factory=list)

    def call(self, target, args, cells=None):
        values = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in args]
        node = self.graph.call_function(target, tuple(args))
        node.meta["val"] = target(*values)
        self.cells[node] = cells or tuple((node.name, row) for row in range(ROWS))
        return node

    def whole(self):
        return [node for node, cells in self.cells.items() if len(cells) == ROWS]


@st.composite
def programs(draw, most=5):
    program = Program()
    for name in ("a", "b"):
        node = program.graph.placeholder(name)
        node.meta["val"] = torch.zeros(ROWS, 2)
        program.cells[node] = tuple((name, row) for row in range(ROWS))
    for _ in range(draw(st.integers(2, most))):
        base = draw(st.sampled_from(program.whole()))
        operand = base
        if draw(st.booleans()):
            row = draw(st.integers(0, ROWS - 1))
            operand = program.call(aten.select.int, (base, 0, row), cells=(program.cells[base][row],))
        if draw(st.booleans()):
            new = program.call(aten.mul_.Scalar, (operand, 2.0), cells=program.cells[operand])
        else:
            new = program.call(aten.add.Tensor, (operand, draw(st.sampled_from(program.whole()))))
        program.ops.append(new)
    fresh = [op for op in program.ops if op.target is aten.add.Tensor]
    returned = draw(st.sampled_from(fresh)) if fresh else program.whole()[0]
    program.graph.output([returned])
    return program, returned


@st.composite
def scheduled(draw, streams=3):
    """A program on random streams, with the events and keeps that graft puts there."""
    program, returned = draw(programs())
    owners = {cell[0] for cell in program.cells[returned]}
    slots = []
    for op in program.ops:
        mine = op.name in owners
        slots.append(ScheduledCall(op.name, "", 0 if mine else draw(st.integers(0, streams - 1)), 0.0, 1.0))
    gm = GraphModule(torch.nn.Module(), program.graph)
    program.graph = gm.graph
    named = {node.name: node for node in gm.graph.nodes}
    program.cells = {named[node.name]: cells for node, cells in program.cells.items()}
    program.ops = [named[op.name] for op in program.ops]
    apply_schedule(gm, Schedule(tuple(slots), 1.0, 1.0, 1.0), "test")
    return program, gm


@st.composite
def disturbed(draw):
    """… with some events more, and some waits and keeps less: right or wrong by chance."""
    program, gm = draw(scheduled())
    stream, ops, count = dict(walk(gm.graph)), program.ops, len(gm.graph.nodes)
    originals = [node for node in gm.graph.nodes if (stream_op(node) or ("",))[0] in ("wait", "keep")]
    # neither the first wait of a stream nor the last join, which are missed in the same way every time
    middle = [n for n in originals if any(op < n and stream[op] == stream[n] for op in ops) and n < max(ops)]
    for index in range(draw(st.integers(0, 3))):
        first, second = sorted(draw(st.permutations(range(len(ops))))[:2])
        early, late = sorted((ops[first], ops[second]))
        if stream[early] != stream[late]:
            with gm.graph.inserting_after(early):
                gm.graph.call_function(RECORD, (100 * count + index,))
            with gm.graph.inserting_before(late):
                gm.graph.call_function(WAIT, (100 * count + index,))
    for node in middle if draw(st.booleans()) else originals:
        if draw(st.integers(0, 2)) == 0:
            gm.graph.erase_node(node)
    return program, gm


# ── every interleaving ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Entry:
    kind: str  # begin, op, record, wait, end
    node: Node | None = None
    event: int = 0
    clears: tuple[str, ...] = ()  # memory that this call may get from the allocator


def entries(program):
    """What is issued to each stream, in order."""
    queues, current, order = {0: [Entry("begin")]}, 0, list(program.graph.nodes)
    free = freed_at(program, order)
    home = {node.name: stream for node, stream in walk(program.graph) if node in program.ops}
    for place, node in enumerate(order):
        kind, number = stream_op(node) or ("", 0)
        if kind == "switch":
            current = number
        elif kind in ("record", "wait"):
            queues.setdefault(current, []).append(Entry(kind, node, number))
        elif node in program.ops:
            clears = tuple(name for name, at in free.items() if at < place and home[name] == current)
            queues.setdefault(current, []).append(Entry("op", node, clears=clears))
    queues[0].append(Entry("end", output_node(program.graph)))
    return queues


def walk(graph):
    current = 0
    for node in graph.nodes:
        kind, number = stream_op(node) or ("", 0)
        current = number if kind == "switch" else current
        yield node, current


def freed_at(program, order):
    """Where the host drops the last reference to each memory that the program allocates."""
    place = {node: index for index, node in enumerate(order)}
    last: dict[str, int] = {}
    for node, cells in program.cells.items():
        uses = [place[user] for user in node.users]
        for name, _ in cells:
            last[name] = max(last.get(name, 0), place[node], *uses, 0)
    allocated = {op.name for op in program.ops if op.target is aten.add.Tensor}
    returned = {name for node in output_node(program.graph).all_input_nodes for name, _ in program.cells[node]}
    return {name: at for name, at in last.items() if name in allocated - returned}


def sequential(program):
    seen: dict = {}
    memory: dict = {}
    for op in program.ops:
        execute(program, op, memory, seen)
    return seen, memory


def execute(program, op, memory, seen):
    values = tuple(memory.get(c, c) for arg in op.all_input_nodes for c in program.cells[arg])
    for cell in program.cells[op]:
        memory[cell] = hash((op.name, cell, values))  # what a write leaves depends on what was there
    seen[op.name] = values


def agrees(program):
    """Whether every interleaving ends as the sequential program does, and never uses memory of somebody else."""
    return Device(program).always_right({}, frozenset(), {}, {})


class Device:
    def __init__(self, program):
        self.program = program
        self.queues = entries(program)
        self.expected = sequential(program)
        self.touching = {}  # memory → the calls that touch it
        for op in program.ops:
            for name in {name for node in (op, *op.all_input_nodes) for name, _ in program.cells[node]}:
                self.touching.setdefault(name, set()).add(op.name)

    def rest(self, stream, at):
        return self.queues[stream][at.get(stream, 0) :]

    def always_right(self, at, recorded, memory, seen):
        """False when one way to go on from here is wrong. `at`: how many entries of each stream are over."""
        ready = [s for s in self.queues if self.may_go_on(s, at, recorded)]
        if not ready:
            return (seen, memory) == self.expected
        marks = [s for s in ready if self.rest(s, at)[0].kind == "record"]  # to record at once allows all the others
        return all(self.right_after(stream, at, recorded, memory, seen) for stream in marks[:1] or ready)

    def may_go_on(self, stream, at, recorded):
        rest = self.rest(stream, at)
        return bool(rest) and (rest[0].kind != "wait" or rest[0].event in recorded)

    def right_after(self, stream, at, recorded, memory, seen):
        entry = self.rest(stream, at)[0]
        after = {**at, stream: at.get(stream, 0) + 1}
        if entry.kind in ("op", "wait") and not at.get(0):
            return False  # runs before the call begins
        if entry.kind == "end" and any(left(self.rest(s, at)) for s in self.queues if s != stream):
            return False  # the call returns while something runs
        if entry.kind == "record":
            return self.always_right(after, recorded | {entry.event}, memory, seen)
        if entry.kind == "op":
            memory, seen = dict(memory), dict(seen)
            if any(not self.touching.get(name, set()) <= seen.keys() for name in entry.clears):
                return False
            execute(self.program, entry.node, memory, seen)
            if seen[entry.node.name] != self.expected[0][entry.node.name]:
                return False
        return self.always_right(after, recorded, memory, seen)


def left(queue):
    return any(entry.kind in ("op", "wait") for entry in queue)
