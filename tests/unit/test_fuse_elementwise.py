"""fuse_elementwise: what becomes one region, and what is refused."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from elementwise_cases import W, Wrap, X, check_order, check_same, fused, gelu_new, programs, run_with, sizes

from graft.graph.nodes import calls
from graft.graph.text import graph_text
from graft.ops.elementwise.reference import elementwise
from graft.transforms import regions

# ── regions ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_chain_is_one_region_r20():
    _, record = check_same(gelu_new, (X,))
    assert sizes(record) == [8] and len(record.matches[0].made) == 2
    assert record.matches[0].anchor.startswith("%mul_3") and record.near_misses == ()


def test_the_graph_shows_the_program_r20():
    gm, _, _ = fused(lambda x: torch.tanh(x / 30.0) * 30.0, (X,))
    program = "t0 = div(i0, 30.0); t1 = tanh(t0); t2 = mul(t1, 30.0); return t2"
    assert programs(gm) == [program]
    assert f"graft.elementwise([%args_0], {program}) : (f32[2, 3, 8])" in graph_text(gm.graph)


def test_a_diamond_is_one_region_r20():
    def diamond(x):
        a = x.exp()
        return a.sin() * a.cos() + a

    _, record = check_same(diamond, (X,))
    assert sizes(record) == [5]


def test_two_loop_shapes_are_two_regions_r20():
    def shapes(x, v):
        return (v.exp() + 1.0).sqrt() * (x.sigmoid() * x)

    _, record = check_same(shapes, (X, X[0, 0].clone()))
    assert sizes(record) == [3, 3]


def test_inner_values_that_are_read_outside_become_results_r20():
    def read(x, w):
        a = x.sigmoid()
        b = a * x
        return b.tanh() + 1.0, a @ w, b

    gm, record, _ = fused(read, (X, W))
    assert sizes(record) == [4]
    assert programs(gm) == ["t0 = sigmoid(i0); t1 = mul(t0, i0); t2 = tanh(t1); t3 = add(t2, 1.0); return t0, t1, t3"]
    check_same(read, (X, W))


def test_a_matmul_between_keeps_both_sides_apart_r20():
    """h + f(h): one kernel would have to wait for itself."""

    def residual(x, w):
        h = (x * 2.0).exp()
        return (h + h @ w).tanh()

    _, record = check_same(residual, (X, W))
    assert sizes(record) == [2, 2]
    (miss,) = record.near_misses
    assert "%add" in miss.anchor and "reads from it before" in miss.reason and "%matmul" in miss.reason


def test_a_detour_over_another_shape_keeps_both_sides_apart_r20():
    def detour(x):
        h = x.exp() * x
        m = (h.mean(-1, keepdim=True) + 1.0).rsqrt()
        return h * m + h

    _, record = check_same(detour, (X,))
    assert sizes(record) == [2, 2, 2]


def test_what_comes_late_waits_for_a_value_from_above_r20():
    """sigmoid(g) is computed far above where it is used; it moves down into the region."""

    def gate(x, g, w):
        s = g.sigmoid()
        f = (x @ w) @ w
        return x + s * f

    _, record = check_same(gate, (X, X.clone(), W))
    assert sizes(record) == [3] and record.near_misses == ()


def test_a_reader_in_between_moves_the_region_up_r20():
    def early(x, w):
        h = x * 2.0
        m = h @ w
        return m, h.sigmoid()

    gm, record = check_same(early, (X, W))
    assert sizes(record) == [2]
    names = [node.target for node in calls(gm.graph)]
    assert names.index(torch.ops.aten.matmul.default) > names.index(operator.getitem)


def test_a_place_is_found_between_last_input_and_first_reader_r20():
    def tight(x, w):
        h = x * 2.0
        y = x @ w
        m = h @ w
        return m, h * y

    gm, record = check_same(tight, (X, W))
    assert sizes(record) == [2]
    check_order(gm)


def test_no_place_is_a_near_miss_r20():
    def never(x, w):
        h = x * 2.0
        m = h @ w
        y = x @ w
        return m, h * y

    gm, record, before = fused(never, (X, W))
    assert record.status == "no_match" and "reads from it before" in record.reason
    assert graph_text(gm.graph) == before


def test_views_end_a_region_and_single_ops_are_left_alone_r20():
    gm, record, before = fused(lambda x, w: (x.exp().reshape(6, 8) @ w).tanh(), (X, W))
    assert record.status == "no_match" and record.near_misses == ()
    assert record.reason.startswith("the graph has no two neighbouring pointwise ops")
    assert graph_text(gm.graph) == before


def test_regions_are_limited_and_say_so_r20():
    def long(x):
        for i in range(regions.MAX_NODES + 10):
            x = x + float(i + 1)
        return x

    gm, record = check_same(long, (X,))
    assert sizes(record) == [10, regions.MAX_NODES]
    assert "at most 64 ops" in record.near_misses[0].reason

    def wide(*xs):
        return sum(xs[1:], xs[0])

    gm, record = check_same(wide, tuple(X + i for i in range(20)))
    assert sizes(record) == [4, 15] and "at most 16 inputs" in record.near_misses[0].reason

    def fan(x, w):
        a = x.exp()
        return [f(a) for f in (torch.sin, torch.cos, torch.tanh, torch.neg, torch.abs)] + [a + i for i in range(1, 6)]

    gm, record, before = fused(fan, (X, W))
    assert "11 of its values are read outside" in record.reason or "10 of its values" in record.reason
    assert graph_text(gm.graph) == before


def test_cost_is_linear_in_the_graph():
    """Layers do not see each other: twice the layers, twice the looks at places."""

    def net(layers):
        def run(x, w):
            for _ in range(layers):
                x = x + gelu_new(x @ w)
            return x

        return run

    looks = []
    for layers in (4, 8):
        count = 0
        old = regions.Grower.find_place

        def counting(self, joined, wished, old=old):
            nonlocal count
            count += len(joined.nodes)
            return old(self, joined, wished)

        regions.Grower.find_place = counting
        try:
            _, record, _ = fused(net(layers), (X, W * 0.1))
        finally:
            regions.Grower.find_place = old
        assert sizes(record) == [9] * layers
        looks.append(count)
    assert looks[1] <= 2.1 * looks[0]


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────────


REFUSED = {
    "unknown op": (lambda x: torch.erfinv(x.tanh()).exp(), "%erfinv", "is not an op that can be generated"),
    "random": (lambda x: F.dropout(x.tanh(), 0.5, True).exp(), "%dropout", "which is random"),
    "alpha": (lambda x: torch.add(x.tanh(), x, alpha=2).matmul(W), "%add", "alpha=2 is not generated"),
    "exponent": (lambda x: x.exp().pow(2.5).matmul(W), "%pow_1", "a power of 2.5"),
    "rounding mode": (lambda x: torch.div(x.exp(), 3.0, rounding_mode="floor"), "%div", "is not an op"),
    "float64": (lambda x: x.double().exp(), "float64", "not in torch.float64"),
    "computed number": (lambda x: x.exp() * x[0, 0, 0].item(), "%item", "a number that is computed"),
    "complex": (lambda x: torch.abs(x.exp() + 1j), "%add", "takes a tensor or a number where the graph has 1j"),
    "8 bits": (lambda x: (x > 1).to(torch.uint8) * 2, "%to", "takes a dtype where the graph has torch.uint8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason_byte_for_byte_r26(name):
    function, node, reason = REFUSED[name]
    gm, record, before = fused(function, (X,))
    assert record.status == "no_match"
    text = " ".join(f"{miss.anchor} {miss.reason}" for miss in record.near_misses)
    assert node in text and reason in text
    assert graph_text(gm.graph) == before


def test_a_write_between_is_refused_r20():
    def write(state, x):
        a = state * x
        state.add_(1.0)
        return a + state

    module = Wrap(write, X)
    gm, record, before = fused(module, (X,))
    assert record.status == "no_match" and "is written in place between" in record.reason
    assert graph_text(gm.graph) == before


def test_a_write_that_does_not_come_between_is_kept_in_order_r20():
    def write(state, x):
        a = (state * x).exp()
        state.add_(1.0)
        b = (state * x).tanh()
        return a, b

    module, other = Wrap(write, X), Wrap(write, X)
    gm, record, _ = fused(module, (X,))
    assert sizes(record) == [2, 2]
    for _ in range(2):
        for got, wanted in zip(run_with(gm, elementwise, X), other(X), strict=True):
            assert torch.equal(got, wanted)


def test_a_place_at_a_write_is_above_it_r20():
    """Between last input and first reader lies the very node that writes; the call must not slip below it."""

    def write(state, x, w):
        h = state * 2.0
        y = x @ w
        state.add_(1.0)
        m = h @ w
        return m, h * y + x

    module, other = Wrap(write, X), Wrap(write, X)
    gm, record, _ = fused(module, (X, W))
    assert sizes(record) == [3]
    for _ in range(2):
        for got, wanted in zip(run_with(gm, elementwise, X, W), other(X, W), strict=True):
            assert torch.equal(got, wanted)


def test_values_that_are_written_to_are_left_alone_r20():
    def write(x):
        a = x.exp() * 2.0
        a[:, 0].add_(1.0)
        return a.tanh() + 1.0

    gm, record, _ = fused(write, (X,))
    assert sizes(record) == [2]  # tanh and + 1, below the write
    assert any("is written in place" in miss.reason for miss in record.near_misses)
    assert torch.equal(run_with(gm, elementwise, X), write(X))


def test_a_scalar_tensor_of_another_dtype_beside_16_bits_is_refused():
    gm, record, before = fused(lambda x, s: (x * s).exp(), (X.bfloat16(), torch.tensor(0.3)))
    assert "depends on the device" in record.near_misses[0].reason
    assert graph_text(gm.graph) == before


def test_a_layout_that_someone_looks_at_is_left_alone():
    gm, record, before = fused(lambda x: torch.as_strided(x.t().exp() * 2.0, (4,), (1,)), (X[0],))
    assert "as_strided" in record.near_misses[0].reason
    assert graph_text(gm.graph) == before
