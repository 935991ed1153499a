"""Sizes that were left dynamic: what the program decided by them holds at every call, or is captured again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim

import graft
from graft.base.errors import CaptureError, GuardFailed, UsageError
from graft.ir.program.signature import Leaf, Signature, guards_over
from marks import examples


class Branches(nn.Module):
    """What torch.export takes for granted is wrong here: that a dynamic size is never 1."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        self.calls.add_(1)
        if x.shape[0] == 1:
            return x * 3 + self.calls
        if x.shape[0] > 10:
            return x * 7
        return x * 2


@pytest.mark.some(1)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_each_branch_on_a_size_is_captured_when_it_is_met(backend):
    module, twin = Branches(), Branches()
    compiled = graft.compile(module, (torch.randn(3, 4),), dynamic_shapes={"x": {0: Dim.DYNAMIC}}, backend=backend)
    for size in (3, 5, 1, 12, 1, 20, 4):
        x = torch.randn(size, 4)
        assert torch.equal(compiled(x), twin(x))
        assert compiled.calls == twin.calls  # one state, whichever variant wrote it
    assert len(compiled.variants) == 3
    notes = [note for note in compiled.report.notes if note.startswith("variant")]
    assert len(notes) == 2 and "dim 0 of x" in notes[0]
    compiled.reset()
    assert compiled.calls == 0


def test_without_branches_one_graph_serves_all_sizes():
    class Plain(nn.Module):
        def forward(self, x, y):
            return x[:, None] * y

    compiled = graft.compile(
        Plain(), (torch.randn(3), torch.randn(3, 4)), dynamic_shapes={"x": {0: Dim.AUTO}, "y": {0: Dim.AUTO}}
    )
    for size in (0, 1, 2, 9):
        x, y = torch.randn(size), torch.randn(size, 4)
        assert torch.equal(compiled(x, y), Plain()(x, y))
    assert len(compiled.variants) == 1


@pytest.mark.parametrize("spec", [None, {}])
def test_the_length_of_a_cache_is_free_unless_it_is_fixed(spec):
    class Cached(nn.Module):
        def forward(self, cache, mask, x, position):
            cache.index_copy_(1, position, x)
            return (cache * mask).sum()  # the mask is as long as the cache

    def args(length):
        return torch.zeros(2, length), torch.ones(2, length), torch.ones(2, 1), torch.tensor([3])

    dynamic = {"cache": spec, "mask": None, "x": None, "position": None}
    compiled = graft.compile(Cached(), args(8), dynamic_shapes=dynamic)
    if spec is None:
        for length in (8, 16, 5):
            assert compiled(*args(length)) == 2
        assert len(compiled.variants) == 1 and compiled.report.notes == ()
    else:
        with pytest.raises(UsageError, match="input cache has the shape"):
            compiled(*args(16))


def test_a_length_that_the_program_fixes_is_in_the_report():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.ones(8))

        def forward(self, cache, x, position):
            cache.index_copy_(1, position, x)
            return (cache * self.mask).sum()

    compiled = graft.compile(Fixed(), (torch.zeros(2, 8), torch.ones(2, 1), torch.tensor([3])))
    assert [n for n in compiled.report.notes if "the length of cache (dim 1) is fixed at 8" in n]
    with pytest.raises(UsageError, match="input cache has the shape"):
        compiled(torch.zeros(2, 16), torch.ones(2, 1), torch.tensor([3]))


def test_sizes_that_no_capture_allows_are_refused():
    class Adds(nn.Module):
        def forward(self, x, y):
            return x * 2 + y

    dynamic = {"x": {0: Dim.DYNAMIC(max=16)}, "y": {0: Dim.DYNAMIC(max=16)}}
    compiled = graft.compile(Adds(), (torch.randn(3), torch.randn(3)), dynamic_shapes=dynamic)
    with pytest.raises(UsageError, match=r"cannot be captured for these inputs|must be"):
        compiled(torch.randn(3), torch.randn(4))
    with pytest.raises(UsageError, match="sizes from 0 to 16"):
        compiled(torch.randn(40), torch.randn(40))


def test_too_many_branches_are_an_error(monkeypatch):
    monkeypatch.setattr("graft.api.compiled.MOST_VARIANTS", 2)
    compiled = graft.compile(Branches(), (torch.randn(3, 4),), dynamic_shapes={"x": {0: Dim.DYNAMIC}})
    compiled(torch.randn(1, 4))
    with pytest.raises(UsageError, match="2 variants are captured already"):
        compiled(torch.randn(12, 4))


def test_signatures_bind_symbols_and_check_expressions():
    signature = Signature(
        (Leaf("x", "float32", "cpu", ("s0", 4)), Leaf("y", "float32", "cpu", ("2*s0 + 1",)), Leaf("n", value=3)),
        guards=("Ne(s0, 5)", "Eq(Mod(s0, 2), 1)", "s0 + 1 <= Max(8, s0)"),
        ranges={"s0": (1, 100)},
    )
    signature.check([torch.zeros(3, 4), torch.zeros(7), 3])
    for values, error, message in (
        ([torch.zeros(3, 4), torch.zeros(8), 3], GuardFailed, "dim 0 of y is 8, but must be"),
        ([torch.zeros(5, 4), torch.zeros(11), 3], GuardFailed, r"Ne\(s0, 5\) \(s0 = 5, dim 0 of x\)"),
        ([torch.zeros(4, 4), torch.zeros(9), 3], GuardFailed, "Mod"),
        ([torch.zeros(9, 4), torch.zeros(19), 3], GuardFailed, "Max"),
        ([torch.zeros(3, 5), torch.zeros(7), 3], UsageError, "input x has the shape"),
        ([torch.zeros(3, 4), torch.zeros(7), 4], UsageError, "3 is fixed in the graph"),
        ([torch.zeros(3, 4), torch.zeros(7), 3.0], UsageError, "3 is fixed in the graph"),
        ([torch.zeros(3, 4).int(), torch.zeros(7), 3], UsageError, "int32"),
    ):
        with pytest.raises(error, match=message):
            signature.check(values)


def test_a_guard_that_is_not_understood_is_an_error():
    with pytest.raises(CaptureError, match="is not understood"):
        list(guards_over({"s0"}, ["Mystery(s0) > 1"]))
    assert list(guards_over({"s0"}, ["u0 > 1", "s0 > 1", "s3 > 1"])) == ["s0 > 1"]


class Contiguous(nn.Module):
    """Whether this copies depends on a size being 1, which torch.export does not look at."""

    def forward(self, x, y):
        return x.transpose(0, 1).contiguous() * 2, y[: x.shape[0]] + 1


def test_a_named_dim_may_have_a_range_with_0_and_1():
    size = Dim("s", max=16)
    shapes = {"x": {0: size}, "y": {0: size}}
    module, given = Contiguous(), (torch.randn(8, 16), torch.randn(8))
    compiled = graft.compile(module, given, dynamic_shapes=shapes)
    assert any("0 and 1" in note for note in compiled.report.notes)
    for size in (8, 2, 1, 16, 0, 1, 5):
        x, y = torch.randn(size, 16), torch.randn(size)
        for got, expected in zip(compiled(x, y), module(x, y), strict=True):
            assert torch.equal(got, expected)
    assert len(compiled.variants) == 3  # 0 and 1 have one each
    with pytest.raises(UsageError, match="17"):
        compiled(torch.randn(17, 16), torch.randn(17))


def test_a_range_that_the_program_does_not_allow_is_refused():
    class Halves(nn.Module):
        def forward(self, x):
            return x.view(-1, 2) if x.shape[0] > 4 else x[:4].sum()

    with pytest.raises(CaptureError, match="satisfy the generated guard"):
        graft.compile(Halves(), (torch.randn(8),), dynamic_shapes={"x": {0: Dim("s", max=16)}})


@given(low=st.sampled_from([None, 1, 2]), high=st.sampled_from([None, 9]), op=st.integers(0, 4))
@settings(max_examples=examples(8), deadline=None)
def test_whatever_torch_export_accepts_is_captured_and_right_at_every_size_of_the_range(low, high, op):
    class Program(nn.Module):
        def forward(self, x):
            return OPS[op](x)

    dims = {"x": {0: Dim("s", min=low, max=high)}}
    module, example = Program(), torch.randn(4, 3)
    try:
        torch.export.export(module, (example,), dynamic_shapes=dims)
    except torch._dynamo.exc.UserError:
        with pytest.raises(CaptureError):
            graft.compile(module, (example,), dynamic_shapes=dims)
        return
    compiled = graft.compile(module, (example,), dynamic_shapes=dims)
    for size in (low or 0, 1 if low == 1 else 2, 5, 9):
        x = torch.randn(size, 3)
        assert torch.equal(compiled(x), module(x))


OPS = (
    lambda x: x.t().contiguous() + 1,
    lambda x: x.reshape(-1).cumsum(0),
    lambda x: x.expand(2, *x.shape).reshape(-1, 3) * 2,
    lambda x: x.view(x.shape[0], 3).squeeze(0).sum(-1),
    lambda x: x.flatten().view(-1, x.shape[0]) if x.shape[0] > 3 else x.t(),
)


class CountedBranches(nn.Module):
    """Two ways by the size of x, and a buffer that every call writes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls.add_(1)
        return x.sum() if x.shape[0] > 4 else x * 2


def test_a_frozen_module_captures_nothing_more_and_a_warm_one_has_it_already(tmp_path):
    sizes = {"x": {0: torch.export.Dim.DYNAMIC}}
    module = CountedBranches()
    compiled = graft.compile(module, (torch.ones(6),), dynamic_shapes=sizes)
    compiled.freeze()
    with pytest.raises(UsageError, match=r"dim 0 of x.*frozen with 1 variants"):
        compiled(torch.ones(3))
    assert float(module.calls) == 0 and compiled(torch.ones(7)) == 7
    other = graft.compile(module, (torch.ones(6),), dynamic_shapes=sizes)
    other.warm([(torch.ones(3),), {"x": torch.ones(8)}])
    other.freeze()
    assert float(module.calls) == 1  # the call above: warming runs nothing
    assert [variant.made_by == "compile" for variant in other.variants] == [True, False]
    assert "dim 0 of x" in other.variants[1].made_by
    torch.testing.assert_close(other(torch.ones(3)), torch.full((3,), 2.0))
    by_sizes = graft.compile(module, (torch.ones(6),), dynamic_shapes=sizes, stance="error_on_new_variant")
    by_sizes.warm([(torch.Size([3]),), ((7,),), {"x": [8]}])
    assert len(by_sizes.variants) == 2
    assert by_sizes.report.notes[-1].startswith("variant 2 was captured when it was warmed")
    with pytest.raises(UsageError, match="input x is str"):
        by_sizes.warm([("3",)])
    with pytest.raises(UsageError, match=r"the sizes \(-1,\) of x are those of no tensor"):
        by_sizes.warm([((-1,),)])
    torch.testing.assert_close(by_sizes(torch.ones(2)), torch.full((2,), 2.0))
    other.save(tmp_path / "saved")
    assert [v.made_by for v in graft.load(tmp_path / "saved").variants] == [v.made_by for v in other.variants]


ON_ZERO = {
    "a dim": lambda x: x.shape[0] == 0,
    "elements": lambda x: x.numel() == 0,
    "truth": lambda x: not x.shape[0],
    "less": lambda x: x.shape[0] < 1,
    "a product": lambda x: 2 * x.shape[0] == 0,
}


@pytest.mark.parametrize("name", ON_ZERO)
@pytest.mark.parametrize("first", [3, 0])
def test_a_branch_on_a_size_of_0_is_a_guard(name, first):
    """torch takes every size for positive and keeps none; then another size gave the wrong branch's result."""

    def forward(x):
        return x.sum() + 7 if ON_ZERO[name](x) else x.sum() - 7

    dims = {"x": {0: Dim.AUTO, 1: Dim.AUTO}}
    compiled = graft.compile(forward, (torch.ones(first, 4),), dynamic_shapes=dims, backend="eager")
    for shape in ((3, 4), (0, 4), (1, 4), (2, 2), (0, 1)):
        assert torch.equal(compiled(torch.ones(shape)), forward(torch.ones(shape)))
    assert len(compiled.variants) == 2


def test_what_operators_ask_of_sizes_for_themselves_is_no_guard():
    def forward(x):
        return x.reshape(-1, 2, 2).sum(1), torch.cat((x, x)).softmax(-1)

    compiled = graft.compile(forward, (torch.ones(3, 4),), dynamic_shapes={"x": {0: Dim.AUTO}}, backend="eager")
    assert compiled.variants[0].signature.guards == ()
    for found, right in zip(compiled(torch.ones(0, 4)), forward(torch.ones(0, 4)), strict=True):
        assert found.shape == right.shape


def test_a_check_of_a_size_stays_a_check():
    def forward(x):
        torch._check(x.shape[0] > 0, lambda: "no rows")
        return x.sum()

    compiled = graft.compile(forward, (torch.ones(3, 4),), dynamic_shapes={"x": {0: Dim.AUTO}}, backend="eager")
    with pytest.raises(UsageError, match="no rows"):
        compiled(torch.ones(0, 4))
