"""graft.compile(…, donate=…): results in memory that the caller gives away, proved safe or refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.export import Dim

import graft
from graft.base.errors import DonationRefused, PositionError, SharedMemoryError, UsageError
from graft.memory.alias_map import Alias
from marks import examples


def step(x, cache, pos):
    """A functional program: its caller's cache stays as it is."""
    new = cache.index_copy(1, pos, x[:, None])
    return new.sum(1), new


def arguments():
    return torch.randn(2, 8), torch.randn(2, 16, 8), torch.tensor([3])


@pytest.mark.parametrize("backend", ["eager", "cuda_graph", "inductor"])
def test_an_update_goes_into_the_donated_cache(backend):
    x, cache, pos = arguments()
    kept = graft.compile(step, (x, cache, pos), backend="eager")
    assert kept.aliases == ()
    compiled = graft.compile(step, (x, cache, pos), backend=backend, donate=("cache",))
    assert compiled.aliases == (Alias("index_copy__default", "cache", "user"),)
    assert [(r.alias, r.kind) for r in compiled.signature.results] == [("", ""), ("cache", "user")]
    (record,) = compiled.report.state
    assert (record.input, record.how, record.kind) == ("cache", "in place", "user")
    for at in (3, 5, 0):
        pos, own = torch.tensor([at]), cache.clone()
        wanted = step(x, own, pos)
        total, new = compiled(x, cache, pos)
        assert new.data_ptr() == cache.data_ptr() and new.shape == cache.shape
        torch.testing.assert_close(total, wanted[0])
        assert torch.equal(cache, wanted[1])


def test_a_value_that_is_computed_anew_is_computed_there(tmp_path):
    compiled = graft.compile(lambda s, x: s * 0.5 + x, (torch.ones(4), torch.ones(4)), donate=["s"])
    code = compiled.graph_module.code
    assert ".out(" in code and "copy_" not in code
    compiled.save(tmp_path / "saved")
    for module in (compiled, graft.load(tmp_path / "saved")):
        state, x = torch.randn(4), torch.randn(4)
        wanted = state * 0.5 + x
        assert module(state, x) is state and torch.equal(state, wanted)
        assert [alias.kind for alias in module.aliases] == ["user"]
    weight = torch.randn(4, 4)  # reads what it would overwrite: a copy, and the report says so
    copied = graft.compile(lambda s: s @ weight, (torch.ones(4, 4),), donate=["s"])
    assert [record.how for record in copied.report.state] == ["copied back"]
    state = torch.randn(4, 4)
    wanted = state @ weight
    assert copied(state) is state and torch.equal(state, wanted)


def test_what_is_computed_in_place_is_in_the_dump_and_the_report(tmp_path):
    given = torch.ones(4), torch.ones(4)
    compiled = graft.compile(lambda s, x: s * 0.5 + x, given, donate=["s"], dump_dir=tmp_path)
    run = graft.open_run(tmp_path)
    before, after = run.around("compute_in_place")
    assert after is run.steps[-1] and "aten.copy_" in before.text()
    assert "aten.copy_" not in after.text() and "aten.add.out" in after.text()
    record = compiled.report.transforms["compute_in_place"]
    assert len(record.matches) == 1 and run.report.transforms["compute_in_place"] == record
    plain = graft.compile(lambda s, x: s * 0.5 + x, given, dump_dir=tmp_path)
    assert "compute_in_place" not in plain.report.transforms
    assert graft.open_run(tmp_path).steps[-1].transform != "compute_in_place"


def test_containers_are_donated_whole():
    def program(caches, x):
        return [(k.index_fill(0, x, 1.0), v + 1) for k, v in caches]

    caches = [(torch.zeros(4, 2), torch.zeros(3)) for _ in range(2)]
    compiled = graft.compile(program, (caches, torch.tensor([1])), donate=("caches",))
    assert {alias.input for alias in compiled.aliases} == {f"caches[{i}][{j}]" for i in (0, 1) for j in (0, 1)}
    new = compiled(caches, torch.tensor([1]))
    assert all(a is b for pair, old in zip(new, caches, strict=True) for a, b in zip(pair, old, strict=True))


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (lambda s, x: (s + x, s[0]), "which is returned, is in its memory"),
        (lambda s, x: (s.add_(x), s * 2)[1], "the program writes it itself"),
        (lambda s, x: x.sum(), "no result can lie in its memory: %sum_1 has another shape or dtype"),
        (lambda s, x: x, "%x is an input or state of the program, which is returned itself"),
        (lambda s, x: (s + x).t(), "lies in memory in another way"),
        (lambda s, x: (n := s + x, n[0]), "shares memory with %select, which is returned too"),
        (lambda s, x: (n := s.index_fill(0, x[0].long(), 1.0), n.sum() + s.sum()), "the old value of %s is read by"),
    ],
)
def test_what_is_not_safe_is_refused_with_the_node(program, reason):
    with pytest.raises(DonationRefused, match="s cannot be donated") as refused:
        graft.compile(program, (torch.ones(4, 4), torch.ones(4, 4)), donate=("s",))
    assert reason in str(refused.value)


def test_exported_programs_and_dynamic_sizes_are_donated_too():
    class Step(torch.nn.Module):
        def forward(self, x, cache, pos):
            return step(x, cache, pos)

    sizes = {"x": {0: Dim("batch")}, "cache": {0: Dim("batch"), 1: Dim("length")}, "pos": None}
    program = torch.export.export(Step(), arguments(), dynamic_shapes=sizes)
    for compiled in (
        graft.compile(program, donate=("cache",)),
        graft.compile(Step(), arguments(), dynamic_shapes=sizes, donate=("cache",)),
    ):
        x, cache, pos = torch.randn(3, 8), torch.randn(3, 5, 8), torch.tensor([4])
        wanted = step(x, cache.clone(), pos)
        total, new = compiled(x, cache, pos)
        assert new is cache and torch.equal(cache, wanted[1]) and torch.equal(total, wanted[0])


def test_names_that_are_none_and_memory_that_is_shared_are_refused():
    with pytest.raises(UsageError, match="donate names 'cash', which is no input; inputs are x, cache, pos"):
        graft.compile(step, arguments(), donate=("cash",))
    with pytest.raises(UsageError, match=r"donate=\('cache',\)"):
        graft.compile(step, arguments(), donate="cache")
    module = torch.nn.Linear(4, 4)
    compiled = graft.compile(module, (torch.ones(4, 4),), donate=("input",))
    with pytest.raises(SharedMemoryError, match="input is written and shares memory with a weight or buffer"):
        compiled(module.weight.detach())
    x, cache, pos = arguments()
    compiled = graft.compile(step, (x, cache, pos), donate=("cache",))
    before = cache.clone()
    with pytest.raises(SharedMemoryError, match="cache is written and shares memory with x"):
        compiled(cache[:, 0], cache, pos)
    with pytest.raises(PositionError):
        compiled(x, cache, torch.tensor([16]))
    assert torch.equal(cache, before)


@pytest.mark.parametrize(("grad", "enabled"), [("drop", True), ("drop", False), ("refuse", False)])
def test_donated_memory_that_requires_gradients_is_refused(grad, enabled):
    compiled = graft.compile(lambda s: s * 2, (torch.ones(3),), backend="eager", grad=grad, donate=("s",))
    leaf = torch.ones(3, requires_grad=True)
    for state in (leaf, leaf * 1):
        refused = pytest.raises(DonationRefused, match="s cannot be donated: it requires gradients")
        with refused, torch.set_grad_enabled(enabled):
            compiled(state)
        assert torch.equal(state, torch.ones(3))
    assert torch.equal(compiled(leaf.detach().clone()), torch.full((3,), 2.0))


@pytest.mark.parametrize("value", [3, {"a": 2, "b": 0.5}])
def test_a_name_that_holds_no_tensor_is_refused(value):
    def program(s, n):
        return s * (n if isinstance(n, int) else n["a"])

    with pytest.raises(DonationRefused, match="n cannot be donated: it holds no tensor"):
        graft.compile(program, (torch.ones(3), value), donate=("s", "n"))


STEPS = (
    lambda a, b: a + b,
    lambda a, b: a * 2,
    lambda a, b: a.slice_scatter(b[:2], 0, 1, 3),
    lambda a, b: a.index_copy(0, torch.tensor([2]), b[:1]),
    lambda a, b: a @ b,
    lambda a, b: a[1:].sum(0) + b,
    lambda a, b: a.view(16).view(4, 4),
    lambda a, b: torch.where(a > b, a, b),
)


@settings(max_examples=examples(40))
@given(
    st.lists(st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5),
    st.sets(st.integers(0, 9), min_size=1, max_size=3),
)
def test_a_donated_program_is_right_or_refused(steps, returned):
    def program(s, x):
        values = [s, x]
        for op, left, right in steps:
            values.append(STEPS[op](values[left % len(values)], values[right % len(values)]))
        return tuple(values[2 + index % (len(values) - 2)] for index in sorted(returned))

    s, x = torch.randn(4, 4), torch.randn(4, 4)
    wanted = [value.clone() for value in program(s.clone(), x)]
    try:
        compiled = graft.compile(program, (s, x), donate=("s",))
    except DonationRefused:
        return
    before = x.clone()
    got = compiled(s, x)
    assert any(value.data_ptr() == s.data_ptr() for value in got)
    assert torch.equal(x, before)
    for value, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(value, right, rtol=0, atol=0)
