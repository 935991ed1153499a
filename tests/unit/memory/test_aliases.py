"""Which nodes share memory, which parts of it, and who reads it later."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from graft.ir.effects import alias_sources, effects, storage_root
from graft.ir.nodes import calls, is_op, output_node
from graft.ir.trace import export_graph
from graft.memory.aliases import Aliases
from graft.memory.inductor_fix.moves import lift, lift_plan
from graft.memory.regions import disjoint

aten = torch.ops.aten


def traced(fn, *args):
    """FakeTensors on every node, each with its own storage, as Inductor has them."""
    return make_fx(fn, tracing_mode="fake")(*args).graph


def node(graph, target, nth=0):
    return [n for n in calls(graph) if is_op(n, target)][nth]


@torch.library.custom_op("alias_test::add_", mutates_args=("x",))
def add_(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(y)
    return y.sum()


add_.register_fake(lambda x, y: y.new_empty(()))


def test_views_in_place_ops_and_results_of_split_share_memory():
    def f(x):
        a, b = x.split(2)
        c = a.t().unsqueeze(0)
        d = x.mul_(2)
        return b + 1, c, d

    graph = traced(f, torch.ones(4, 6))
    aliases = Aliases(graph)
    (x,) = (n for n in graph.nodes if n.op == "placeholder")
    for target in (aten.t.default, aten.unsqueeze.default, aten.mul_.Tensor):
        assert aliases.may_alias(x, node(graph, target)), target
    assert not aliases.may_alias(x, node(graph, aten.add.Tensor))
    assert aliases.inputs(node(graph, aten.unsqueeze.default)) == [x]


def test_a_fresh_result_of_a_mutating_op_is_no_alias():
    graph = traced(lambda x, y: torch.ops.alias_test.add_(x, y) * 2, torch.ones(3), torch.ones(3))
    call = node(graph, torch.ops.alias_test.add_.default)
    assert alias_sources(call) == []
    assert not Aliases(graph).same(call, call.args[0])


def test_reshape_is_a_view_where_the_storage_says_so():
    def f(x):
        return x.reshape(-1) + 1, x.t().reshape(-1) + 1  # the second copies

    graph = traced(f, torch.ones(2, 3))
    (x,) = (n for n in graph.nodes if n.op == "placeholder")
    fresh = node(graph, aten.add.Tensor, 1).args[0]
    assert not Aliases(graph, trusted=True).may_alias(x, fresh)
    view = node(graph, aten.add.Tensor).args[0]
    assert Aliases(graph, trusted=True).may_alias(x, view) and Aliases(graph).may_alias(x, view)


def test_nodes_of_one_storage_are_joined_only_when_trusted():
    graph = traced(lambda x: (x.sin(), x.cos()), torch.ones(3))
    sin, cos = node(graph, aten.sin.default), node(graph, aten.cos.default)
    cos.meta["val"] = sin.meta["val"]
    assert Aliases(graph, trusted=True).may_alias(sin, cos)
    assert not Aliases(graph).may_alias(sin, cos)


BASE = torch.empty(4, 5, 6, 7)
PAIRS = [
    (lambda b: b[0], lambda b: b[1], True),
    (lambda b: b[:2], lambda b: b[1:], False),
    (lambda b: b[:, 0], lambda b: b[:, 1], True),  # interleaved in memory
    (lambda b: b[:, :, 1:3], lambda b: b[:, :, 3:], True),
    (lambda b: b[:, :, 1:4], lambda b: b[:, :, 3:], False),
    (lambda b: b[..., ::2], lambda b: b[..., 1::2], False),  # apart, but the proof does not see it
    (lambda b: b.transpose(0, 1)[0], lambda b: b[:, 1], True),
    (lambda b: b, lambda b: b[3, 4, 5, 6], False),
    (lambda b: b.as_strided((2, 3), (1, 1), 0), lambda b: b.as_strided((2,), (1,), 3), False),
    (lambda b: b[0], lambda b: b.clone()[1], False),  # another storage: not for this proof
]


@pytest.mark.parametrize(("left", "right", "apart"), PAIRS)
def test_disjoint_is_a_proof(left, right, apart):
    a, b = left(BASE), right(BASE)
    assert disjoint(a, b) is disjoint(b, a) is apart
    if apart:  # the proof against memory itself
        BASE.zero_()
        a.add_(1)
        assert b.sum() == 0


def test_reads_of_the_old_value_come_with_their_names():
    def f(x):
        v = x[0]
        a = x.sin()
        b = v.cos()
        return a, b, x.size(0), v

    graph = traced(f, torch.ones(3, 4))
    aliases = Aliases(graph)
    (x,) = (n for n in graph.nodes if n.op == "placeholder")
    select, sin = node(graph, aten.select.int), node(graph, aten.sin.default)
    assert [r.text() for r in aliases.reads(x, select)] == [
        "%sin reads %x_1",
        "%cos reads %select",
        "%select is returned",
    ]
    assert [r.text() for r in aliases.reads(x, sin, before=output_node(graph))] == ["%cos reads %select"]
    assert aliases.reads(sin, select) == [r for r in aliases.reads(sin, select) if r.reader.op == "output"]


def test_overwriting_is_no_read():
    graph = traced(lambda x, y: (x.copy_(y), y.sin())[1], torch.ones(3), torch.ones(3))
    x, y = (n for n in graph.nodes if n.op == "placeholder")
    aliases = Aliases(graph)
    assert [r.reader.name for r in aliases.reads(x, y)] == []
    assert [r.reader.name for r in aliases.reads(y, y)] == ["copy_", "sin"]


def test_pure_reads_move_with_what_they_need_and_others_do_not():
    def f(x):
        a = x.sin()
        b = x[0].cos() * 2
        c = a + 1
        d = torch.rand_like(x)
        return b, c, d

    graph = traced(f, torch.ones(3, 4))
    sin, mul = node(graph, aten.sin.default), node(graph, aten.mul.Tensor)
    plan, stuck = lift_plan([mul], sin)
    assert [n.name for n in plan] == ["select", "cos", "mul"] and stuck is None
    assert lift_plan([node(graph, aten.add.Tensor)], sin) == ([], sin)  # needs the call itself
    rand = node(graph, aten.rand_like.default)
    assert lift_plan([rand], sin) == ([], rand)
    lift(plan, sin)
    graph.lint()
    assert mul < sin


def test_no_result_is_in_one_of_several_arguments():
    """`storage_root` follows one source: no tensor op of ATen may give a result with more."""
    wrong = []
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in getattr(packet, "overloads", list)():
            target = getattr(packet, overload)
            tensors = any("Tensor" in str(r.type) for r in target._schema.returns)
            wrong += [str(target)] if tensors and any(len(places) > 1 for places in effects(target).results) else []
    assert wrong == []


def test_items_of_several_results_are_told_apart():
    def f(x, y):
        a, b = x.split(2)
        values, places = y.topk(2)
        one, two = torch.broadcast_tensors(x, y)
        low, high = torch.aminmax(x, dim=0, out=(torch.empty(6), torch.empty(6)))
        return a, b, values, places, one, two, low, high

    graph = make_fx(f, tracing_mode="fake", pre_dispatch=True)(torch.ones(4, 6), torch.ones(4, 6)).graph
    x, y = (n for n in graph.nodes if n.op == "placeholder")
    roots = [storage_root(n) for n in output_node(graph).args[0]]
    assert roots[:2] == [x, x] and roots[2] not in (x, y) and roots[3] not in (x, y)
    assert roots[4:6] == [x, y] and roots[6] is not roots[7]


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.ops.aten.atleast_1d(x),
        lambda x: torch.ops.aten._unsafe_view(x, [6, 4]),
        lambda x: torch.ops.aten.einsum("ij->ji", [x]),
        lambda x: torch.ops.aten.unsafe_chunk(x, 2)[0],
        lambda x: torch.ops.aten.sum_to_size(x, [4, 6]),
        lambda x: torch.ops.aten.conj_physical(x),
        lambda x: torch.ops.aten.alpha_dropout(x, 0.5, False),
    ],
)
def test_ops_that_return_views_and_do_not_say_so(f):
    x = torch.ones(4, 6)
    assert f(x).untyped_storage()._cdata == x.untyped_storage()._cdata
    graph = make_fx(f, tracing_mode="fake", pre_dispatch=True)(x).graph
    (given,) = (n for n in graph.nodes if n.op == "placeholder")
    assert given in Aliases(graph).inputs(output_node(graph).args[0])


def test_a_product_of_several_is_no_view():
    graph = make_fx(lambda x, y: torch.ops.aten.einsum("ij,ij->i", [x, y]), tracing_mode="fake", pre_dispatch=True)(
        torch.ones(2, 3), torch.ones(2, 3)
    ).graph
    x, y = (n for n in graph.nodes if n.op == "placeholder")
    assert not Aliases(graph).same(x, y)


def test_tied_attributes_are_one_memory_and_only_what_is_asked_for_is_read():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            memory = torch.zeros(4, 6)
            self.register_buffer("a", memory)
            self.register_buffer("b", memory[1])
            self.register_buffer("c", torch.zeros(6))

        def forward(self, x):
            self.a.add_(1)
            return self.b.view(2, 3) + x, self.c.view(2, 3) + x

    gm = export_graph(Tied(), (torch.ones(2, 3),))
    a, b, c = (next(n for n in gm.graph.nodes if n.target == name) for name in "abc")
    aliases = Aliases(gm.graph)
    assert aliases.same(a, b) and not aliases.same(a, c)
    part = Aliases(gm.graph, within=[a])
    assert a in part and b in part and c not in part and len(part.group(a)) == len(aliases.group(a))
