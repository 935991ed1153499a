"""Mutating ops on the Inductor route: right in every trap, with no copy too many."""

from __future__ import annotations

import copy
import os
import pickle

import pytest
import torch
from torch.utils import _pytree as pytree

from graft.memory.inductor_fix.functionalization import FixFunctionalization, inductor_options, reports
from marks import FULL, short
from mutating_programs import Program, build, program
from postgrad import Compiled, compile_passes, copies

os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # the instruction sets of this machine are not tried out
fuzz = torch.ops.fuzz


@torch.library.custom_op("r23::kv_write_", mutates_args=("cache",))
def kv_write_(cache: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> None:
    cache.index_copy_(1, at, rows)


kv_write_.register_fake(lambda cache, rows, at: None)


def stacked(cache, rows, at):
    """cache [l, b, s, h], written layer by layer; each layer is read."""
    total = 0
    for layer in range(cache.shape[0]):
        torch.ops.r23.kv_write_(cache[layer], rows + layer, at)
        total = total + cache[layer].sum(1)
    return total


def memory(values) -> list[int]:
    return [value.untyped_storage().data_ptr() for value in values]


def shared(left, right) -> set[tuple[int, int]]:
    right = memory(right)
    return {(i, j) for i, a in enumerate(memory(left)) for j, b in enumerate(right) if a == b}


def difference(eager, eager_args, got, got_args) -> str | None:
    """What is not as in eager: a value, an input, or who shares memory with whom."""
    eager, got = pytree.tree_leaves(eager), pytree.tree_leaves(got)
    for place, (a, b) in enumerate(zip((*eager, *eager_args), (*got, *got_args), strict=True)):
        if not torch.allclose(a, b, rtol=1e-4, atol=1e-5):
            return f"result {place} is wrong" if place < len(eager) else f"input {place - len(eager)} is wrong"
    if shared(eager, eager_args) != shared(got, got_args):
        return f"results share memory with inputs: {shared(got, got_args)}, in eager {shared(eager, eager_args)}"
    if not shared(got, got) <= shared(eager, eager):
        return "two results share memory"
    return None


def check(compiled: Compiled, kind: str, fn, args) -> str | None:
    eager_args, got_args = copy.deepcopy(args), copy.deepcopy(args)
    eager = fn(*eager_args)
    try:
        got = compiled(kind, *got_args)
    except RuntimeError as error:  # ATen refuses to copy onto overlapping memory, where Inductor's kernel would
        return f"refused: {error}"
    return difference(eager, eager_args, got, got_args)


# name: program text, copies that are needed, whether Inductor alone is right
TRAPS = {
    "a fork of the cache, ATen": ("v = p.clone(); p.mul_(2); v.index_put_((index,), q[:2]); return v", 2, False),
    "a fork of the cache, custom op": ("v = p.clone(); {scale}(p, 2.); {scale}(v, 9.); return v", 1, False),
    "shift by one": ("p[1:] = p[:-1].clone(); return p + 0", 1, False),
    "index_put from itself": ("p.index_put_((index,), p[1:3].clone()); return p + 0", 1, False),
    "the op reads what it overwrites": ("v = {blend}(p, p.clone()); return v", 1, False),
    "old value read later": ("v = p.sin(); w = v.cos(); {scale}(v, 2.); return w + v", 0, True),
    "old value returned": ("v = p.sin(); w = v.clone(); {scale}(v, 2.); return v, w", 1, True),
    "result returned, input overwritten": ("{scale}(p, 2.); v = p.clone(); {scale}(p, 3.); return v", 1, False),
    "mutated and returned": ("{scale}(p, 2.); return p", 0, True),
    "mutated, a view of it returned": ("{scale}(p, 2.); return p[1:]", 0, True),
    "mutated, a copy of it returned": ("{scale}(p, 2.); return p.clone()", 1, False),
    "index_put, a copy of it returned": ("p.index_put_((index,), q[:2]); return p.clone()", 1, False),
    "input must not change": ("v = p.clone(); {scale}(v, 2.); return v", 1, True),
    "view of an input must not change": ("v = p[1:].clone(); {scale}(v[1:], 2.); return v", 1, False),
    "two arguments in one storage": ("v = p.sin(); {swap}(v[0], v[1], .5); return v", 0, True),
    "two arguments, one value": ("v = p.sin(); w = v.clone(); {swap}(v, w, .5); return v, w", 1, True),
    "overlapping views": ("v = p.sin(); {scale}(v[:3], 2.); {scale}(v[1:], 3.); return v", 0, True),
    "the same tensor twice": ("v = p.sin(); w = {blend}(v, v.clone()); return v, w", 1, False),
    "views of views": ("v = p.sin(); {scale}(v.t()[1:].unsqueeze(0)[0], 2.); return v", 0, True),
    "as_strided": ("{scale}(p.as_strided((2, 6), (6, 1), 6), 2.); return p.sum()", 0, True),
    "as_strided of a clone": ("v = p[1:].clone(); w = v.as_strided((2, 6), (6, 1), 6); return w + 0", 0, False),
    "a chain": ("v = p @ q.t(); {scale}(v, 2.); {scale}(v, 3.); {scale}(v[0], 2.); return v", 0, True),
    "input chain with copy_ at the end": ("{scale}(p, 2.); {scale}(p, 3.); p.add_(1); return q + p", 1, True),
    "input to input": ("q.copy_(p); p.mul_(2); return p + q", 3, False),
    "input to input, written there": ("{scale}(p, 2.); r.copy_(p); v = {blend}(r, q); return v, p + 0", 2, True),
    "two results, one value": ("v = p.sin(); return v, v.clone()", 1, True),
    "a clone behind a view": ("v = p.clone(); w = v[1:].clone(); {scale}(p, 2.); return w", 1, False),
    "reads of another row": ("v = p.sin(); w = v[0] * 2; {scale}(v[1], 2.); return w, v", 0, True),
}


def trap(text: str) -> Program:
    body = text.format(scale="torch.ops.fuzz.scale_", blend="torch.ops.fuzz.blend_", swap="torch.ops.fuzz.swap_")
    return build("def program(p, q, r, index):\n    " + body.replace("; ", "\n    "))


@pytest.mark.some(14)
@pytest.mark.parametrize("name", TRAPS)
def test_traps_with_the_copies_they_need(name):
    text, needed, stock_is_right = TRAPS[name]
    subject = trap(text)
    compiled = compile_passes(subject.function, subject.inputs())
    assert check(compiled, "fixed", subject.function, subject.inputs()) is None
    assert copies(compiled.graphs["fixed"]) == needed, compiled.report.text()
    assert (check(compiled, "stock", subject.function, subject.inputs()) is None) == stock_is_right
    if stock_is_right:
        assert needed <= copies(compiled.graphs["stock"])


@pytest.mark.parametrize(("v2", "dynamic"), [(False, False), (True, True)])
def test_the_older_form_and_symbolic_sizes(v2, dynamic):
    for name in (
        "old value read later",
        "a fork of the cache, custom op",
        "mutated, a copy of it returned",
        "as_strided",
    ):
        subject = trap(TRAPS[name][0])
        compiled = compile_passes(subject.function, subject.inputs(), ("fixed",), v2=v2, dynamic=dynamic)
        assert check(compiled, "fixed", subject.function, subject.inputs()) is None, name


@pytest.mark.some(1)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_stacked_cache_is_written_in_place(dynamic):
    args = (torch.zeros(4, 2, 8, 3), torch.randn(2, 2, 3), torch.tensor([1, 5]))
    compiled = compile_passes(stacked, args, dynamic=dynamic)
    assert check(compiled, "fixed", stacked, args) is None
    assert copies(compiled.graphs["stock"]) >= 3 and copies(compiled.graphs["fixed"]) == 0
    assert len(compiled.report.restored) == 4 and not compiled.report.kept
    # static sizes prove that layers do not overlap; without that proof the reads move above the next write
    assert bool(compiled.report.moved) == dynamic


REASONS = {
    "v = p.clone(); {scale}(v, 2.); return v": "graph input %arg0_1 must not change",
    "v = p.sin(); w = v.clone(); {swap}(v, w, .5); return v, w": "it shares memory with %sin, which",
    "v = p.sin(); w = v.clone(); {scale}(v, 2.); {scale}(w, 3.); return v + w": "reads %sin after the write",
    "v = p[1:].clone(); {scale}(v, 2.); return v": "it may be in the memory of graph input %arg0_1",
    "p[1:] = p[:-1].clone()": "the call reads %arg0_1 while it overwrites it",
}


@pytest.mark.parametrize("text", REASONS)
def test_a_kept_copy_says_why_with_the_names_of_nodes(text):
    subject = trap(text)
    compiled = compile_passes(subject.function, subject.inputs(), ("fixed",))
    assert any(REASONS[text] in kept.reason for kept in compiled.report.kept), compiled.report.text()


def test_a_graph_that_writes_nothing_stays_as_it_is():
    compiled = compile_passes(lambda x: (x.sin() + 1).cos(), (torch.ones(3),))
    assert compiled.report.text() == "nothing writes in place"
    assert str(compiled.graphs["fixed"].graph) == str(compiled.graphs["stock"].graph)


@pytest.mark.parametrize("first", short(range(0, 300, 25), 0))
def test_random_programs(first):
    """None is wrong, with fewer copies than Inductor alone makes where it is right; and it is not always right."""
    stock, fixed, stock_wrong = 0, 0, 0
    for seed in range(first, first + (25 if FULL else 13)):
        subject = program(seed)
        kinds = ("stock", "fixed") if seed % 3 == 0 else ("fixed",)
        compiled = compile_passes(subject.function, subject.inputs(), kinds)
        wrong = check(compiled, "fixed", subject.function, subject.inputs())
        assert wrong is None, f"seed {seed}: {wrong}\n{subject.text}\n{compiled.report.text()}"
        if "stock" in kinds and check(compiled, "stock", subject.function, subject.inputs()) is None:
            stock += copies(compiled.graphs["stock"])
            fixed += copies(compiled.graphs["fixed"])
        elif "stock" in kinds:
            stock_wrong += 1
    assert fixed < stock and stock_wrong > 0, (fixed, stock, stock_wrong)


def forks(c, at, rows, x):
    """The two programs that Inductor alone gets wrong."""
    r = c.clone()
    c.mul_(2)
    r.index_put_((at,), rows)
    x[1:] = x[:-1].clone()
    return r


def reads_and_writes(p, q):
    """A read of the old value that lowering delays, and shifted reads of memory that an op wrote."""
    old = p.sin()
    fuzz.scale_(p, 1.25)
    fuzz.scale_(q, 1.25)
    q[1:] = q[:-1] + 1
    p.copy_(p.flip(0))
    return old * 2, p + 0, q + 0


def shifted_after_a_scatter(p, q, index):
    """The scatter is written into p, and what is shifted is read from there."""
    p.index_copy_(1, index, q[:, :2])
    p.copy_(torch.roll(p, 1, 0))
    q.index_put_((index,), p[:2])
    q.mul_(2)
    return p.sum()


def transposed(x, index, cache):
    """Loops of different ranges are fused, beside a copy that a scatter writes into."""
    cache.transpose(1, 2).index_copy_(1, index, x.transpose(1, 2))
    return cache.sum(2), x + 1


def overlapping(x, c):
    """The same with writes that overlap: the product is read behind both."""
    y = x + 1
    c[:3].add_(1)
    c[1:].mul_(2)
    return y, c[:3] * c[1:]


REAL = [
    (transposed, lambda: (torch.rand(2, 2, 2, 4), torch.tensor([0, 3]), torch.rand(2, 2, 8, 4))),
    (overlapping, lambda: (torch.rand(4, 6), torch.rand(4, 6))),
    (shifted_after_a_scatter, lambda: (torch.rand(8, 16), torch.rand(8, 16), torch.tensor([2, 0]))),
    (forks, lambda: (torch.arange(64.0), torch.tensor([1]), torch.tensor([9.0]), torch.arange(64.0))),
    (reads_and_writes, lambda: (torch.rand(8, 16), torch.rand(8, 16))),
    (stacked, lambda: (torch.zeros(4, 2, 8, 16), torch.rand(2, 2, 16), torch.tensor([1, 5]))),
]


@pytest.mark.some(1)
@pytest.mark.parametrize(("fn", "inputs"), REAL, ids=lambda value: getattr(value, "__name__", ""))
def test_compiled_code_is_right(fn, inputs):
    args = inputs()
    eager_args, got_args = copy.deepcopy(args), copy.deepcopy(args)
    eager = fn(*eager_args)
    reports()
    torch._dynamo.reset()
    with torch.no_grad(), torch._inductor.config.patch(fx_graph_cache=False):
        got = torch.compile(fn, options=inductor_options())(*got_args)
    assert difference(eager, eager_args, got, got_args) is None
    (report,) = reports()
    assert reports() == []
    if fn is shifted_after_a_scatter:
        assert len(report.kept) == 1 and "overwritten" in report.kept[0].reason, report.text()
    if fn is stacked:
        assert len(report.restored) == 4 and not report.kept and not report.protected


def test_passes_have_an_identity_for_inductors_caches():
    hooks = inductor_options()
    again = pickle.loads(pickle.dumps(copy.deepcopy(hooks)))
    for name, hook in hooks.items():
        assert hook.uuid() is not None and again[name].uuid() == hook.uuid()
    assert isinstance(hooks["post_grad_custom_post_pass"], FixFunctionalization)
