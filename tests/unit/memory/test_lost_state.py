"""State in Python: a write where a graph can keep it, else refused with its path; the module is left alone."""

from __future__ import annotations

import types
from collections import deque

import pytest
import torch
from torch import nn

import graft
from graft.base.errors import CaptureError
from graft.ir.trace import export_graph

ONES = torch.ones(4)


class Stateful(nn.Module):
    """Runs `step(self, x)`, and holds one of each kind of state."""

    def __init__(self, step):
        super().__init__()
        self.step = step
        self.n = 0
        self.st, self.other = torch.arange(4.0), -torch.arange(4.0)
        self.register_buffer("cache", None)
        self.weight = nn.Parameter(torch.ones(4))
        self.obj = types.SimpleNamespace(h=torch.zeros(4), inner=types.SimpleNamespace(k=0))
        self.d, self.list, self.deep = {"h": torch.zeros(4)}, [1], [{"k": torch.zeros(4)}]
        self.last = deque([1, 2], maxlen=2)
        self.shape = (1, 2)

    def forward(self, x):
        result = self.step(self, x)
        return x + 1 if result is None else result


def holdings(module):
    """All that a Stateful holds, by identity where it has one; a FakeTensor or another list would show."""
    tables = {name: dict(vars(module)[name]) for name in ("_buffers", "_parameters", "_modules")}
    plain = {k: v for k, v in vars(module).items() if k not in vars(nn.Module())}
    inside = [module.obj.h, module.obj.inner.k, *module.d.items(), *module.list, *module.deep[0].items()]
    flat = [*plain.items(), *(item for table in tables.values() for item in table.items())]
    return [(k, id(v)) for k, v in flat] + list(map(repr, inside)) + [list(module.last)]


def assign(path):
    """A step that runs one statement."""
    code = compile(path, "step", "exec")
    return lambda self, x: exec(code, {"self": self, "x": x, "torch": torch, "nn": nn})


def view_and_new(self, x):
    old = self.st[1:]
    self.st = self.st + x
    return old, self.st * 2


def swap(self, x):
    old = self.st[1:]
    self.st, self.other = self.other + x, self.st
    return old, self.st[:2], self.other


@pytest.mark.parametrize("wrap", [lambda m: m, nn.Sequential], ids=["root", "submodule"])
@pytest.mark.parametrize("step", [view_and_new, swap])
def test_assigned_tensor_attributes_are_written(step, wrap):
    eager, inner = Stateful(step), Stateful(step)
    first = inner.st, inner.other
    compiled = graft.compile(wrap(inner), (ONES,), backend="eager")
    assert torch.equal(inner.st, eager.st)
    for _ in range(3):
        for got, wanted in zip(compiled(ONES), eager(ONES), strict=True):
            assert torch.equal(got, wanted)
        assert torch.equal(inner.st, eager.st) and torch.equal(inner.other, eager.other)
    assert inner.st is first[0] and inner.other is first[1]


LOST = [
    ("self.n += 1", r"sets m\.n \(an int\)"),
    ("self.new = 3", r"sets m\.new \(an int\)"),
    ("self.new = x * 2", r"sets m\.new \(a tensor\)"),
    ("self.n = x * 2", r"sets m\.n \(a tensor\)"),
    ("self.st = None", r"takes away the tensor m\.st"),
    ("del self.st", r"takes away the tensor m\.st"),
    ("self.st = torch.cat((self.st, x))", r"assigns torch.float32 \(8,\) on cpu to the tensor m\.st"),
    ("self.cache = x * 2", r"sets m\.cache \(a tensor\)"),
    ("self.register_buffer('late', x * 2)", r"sets m\.late \(a tensor\)"),
    ("self.weight = nn.Parameter(self.weight * 2)", r"sets m\.weight"),
    ("self.extra = nn.Linear(1, 1)", r"sets m\.extra \(a Linear\)"),
    ("self.obj.h = self.obj.h + x", r"sets m\.obj\.h \(a tensor\)"),
    ("self.obj.inner.k += 1", r"sets m\.obj\.inner\.k \(an int\)"),
    ("self.d['h'] = x * 2", r"sets m\.d\['h'\] \(a tensor\)"),
    ("self.deep[0]['k'] = x * 2", r"sets m\.deep\[0\]\['k'\] \(a tensor\)"),
    ("self.list.append(x)", r"sets m\.list\[1\] \(a tensor\)"),
    ("self.list.pop()", r"sets m\.list\[0\] \(taken away\)"),
    ("self.list = [x]", r"sets m\.list \(a list\)"),
    ("self.last.append(3)", r"sets m\.last\[0\] \(an int\)"),
    ("self.shape = (1, 3)", r"sets m\.shape \(a tuple\)"),
]


@pytest.mark.parametrize(("statement", "message"), LOST, ids=[statement for statement, _ in LOST])
def test_what_a_graph_cannot_keep_is_refused(statement, message):
    module = Stateful(assign(statement))
    before, own = holdings(module), dict(vars(module))
    with pytest.raises(CaptureError, match=message):
        export_graph(Holder(module), (ONES,))
    assert holdings(module) == before and vars(module).keys() == own.keys()


class Holder(nn.Module):
    def __init__(self, m):
        super().__init__()
        self.m = m

    def forward(self, *args):
        return self.m(*args)


def test_the_message_says_what_to_do():
    wanted = r"forward sets n \(an int\): a graph cannot keep it; make it a registered buffer \(a tensor\) and write"
    with pytest.raises(CaptureError, match=wanted):
        graft.compile(Stateful(assign("self.n += 1")), (ONES,), backend="eager")


HARMLESS = [
    "self.shape = (1, 2)",
    "self.n = 0",
    "self.n += 1; self.n -= 1",
    "self.list = [1]",
    "self.list.append(2); self.list.pop()",
    "self.done = True",
    "self.call = len",
    "self.register_forward_hook(print)",
    "self.st.add_(x)",
]


@pytest.mark.parametrize("statement", HARMLESS)
def test_what_loses_nothing_is_captured(statement):
    module = Stateful(assign(statement))
    before = holdings(module)
    export_graph(module, (ONES,))
    assert holdings(module) == before and not module._forward_hooks and "done" not in vars(module)


def test_a_trace_that_raises_leaves_the_module_as_it_was():
    module = Stateful(assign("self.n += 1; self.d['h'] = x; self.cache = x; self.list.append(x); x.nonsense()"))
    before = holdings(module)
    with pytest.raises(CaptureError, match="nonsense"):
        export_graph(module, (ONES,))
    assert holdings(module) == before


def test_a_tied_tensor_attribute_is_refused():
    module = Stateful(assign("self.st = self.st + x"))
    module.register_buffer("same", module.st)
    with pytest.raises(CaptureError, match=r"shares its memory .* \(same\)"):
        export_graph(module, (ONES,))


class Arguments(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x, d, *, items):
        self.change(x, d, items)
        return x + d["k"] + items[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, d, items: d.update(k=d["k"] + x), r"changes the argument d\['k'\] \(a tensor\)"),
        (lambda x, d, items: items.append(x), r"changes the argument items\[1\]"),
        (lambda x, d, items: d["deep"].pop(), r"changes the argument d\['deep'\]\[0\] \(taken away\)"),
    ],
)
def test_a_changed_container_argument_is_refused(change, message):
    given = {"k": torch.zeros(4), "deep": [ONES]}
    with pytest.raises(CaptureError, match=message):
        export_graph(Arguments(change), (ONES, given), {"items": [ONES]})
    assert torch.equal(given["k"], torch.zeros(4)) and len(given["deep"]) == 1


def test_a_container_argument_with_the_same_objects_is_captured():
    module = Arguments(lambda x, d, items: (d.update(k=d["k"]), d["k"].add_(x)))
    given, expected = ({"k": torch.zeros(4), "deep": [ONES]} for _ in range(2))
    compiled = graft.compile(module, (ONES, given), kwargs={"items": [ONES]}, backend="eager")
    assert torch.equal(compiled(ONES, given, items=[ONES]), module(ONES, expected, items=[ONES]))
    assert torch.equal(given["k"], expected["k"])


@pytest.mark.parametrize("where", ["attribute", "object", "list", "view"])
def test_capturing_does_not_count_as_a_call_for_tensors_that_are_no_buffers(where):
    """torch runs a call for real whose tensors are all constants: `st.add_(1)` counted the trace."""

    def step(self, x):
        held = {"attribute": self.st, "object": self.obj.h, "list": self.deep[0]["k"], "view": self.st[1:]}[where]
        held.add_(1)
        held[:2].mul_(3)
        return self.st + self.obj.h + self.deep[0]["k"] + x

    module, twin = Stateful(step), Stateful(step)
    compiled = graft.compile(module, (ONES,))
    for _ in range(2):
        assert torch.equal(compiled(ONES), twin(ONES))
        assert torch.equal(module.st, twin.st) and torch.equal(module.obj.h, twin.obj.h)


def test_capturing_branches_and_flex_attention_does_not_count_as_a_call_either():
    """Dynamo takes them apart, and what they close over goes into the graph as their arguments."""
    from torch.nn.attention.flex_attention import flex_attention

    def step(self, x):
        self.st.add_(1)
        self.obj.h.sub_(1)
        return torch.cond(x.sum() > 0, lambda x: x * self.weight + self.obj.h, lambda x: x - self.st, (x,))

    module, twin = Stateful(step), Stateful(step)
    compiled = graft.compile(module, (ONES,), backend="eager")
    cond = next(node for node in compiled.graph_module.graph.nodes if node.name == "cond")
    assert len(cond.args[3]) == 4  # x, weight, obj.h, st
    with torch.no_grad():
        for x in (ONES, -ONES, ONES):
            assert torch.equal(compiled(x), twin(x))
            assert torch.equal(module.st, twin.st) and torch.equal(module.obj.h, twin.obj.h)

    attention = export_graph(Stateful(lambda self, x: flex_attention(x, x, x)), (torch.randn(1, 2, 128, 16),))
    assert "flex_attention" in str(attention.graph)
