"""State that is no cache, results that are state, programs that write nothing, copies that must stay."""

from __future__ import annotations

import pytest
import torch

import graft
from graft.base.errors import CaptureError, GraftError
from marks import short
from state_cases import BACKENDS, Case, Stateful, agree, agree_all, whole

X = [(whole(4, 6, seed=step),) for step in range(3)]


def case(function, *caches, **buffers):
    return Case(function, X, caches, buffers)


def a():
    return whole(4, 6, seed=8)


def count(self, x):
    self.n += 1
    self.total.add_(x.sum())
    return x * self.n


def recur(self, x):
    self.h.copy_(torch.tanh(self.h + x))
    return self.h * 2


def roll(self, x):
    self.w.copy_(torch.roll(self.w, -1, 0))
    self.w[-1] = x[0]
    return self.w.sum(0)


def shift(self, window, x):
    window.copy_(torch.cat((window[1:], x[:1])))
    return window * 1


def shift_in_place(self, x):
    self.w[:-1] = self.w[1:].clone()
    self.w[-1:] = x[:1]
    return self.w.amax(0)


def counter_as_position(self, x):
    self.w.index_copy_(0, self.n % 4, x[:1])
    self.n += 1
    return self.w.sum(0)


OTHER_STATE = {
    "counter": case(count, n=torch.zeros((), dtype=torch.int64), total=torch.zeros(())),
    "recurrent": case(recur, h=a()),
    "rolling window, roll": case(roll, w=a()),
    "rolling window, cat, of the caller": case(shift, a()),
    "rolling window, shifted in place": case(shift_in_place, w=a()),
    "ring buffer": case(counter_as_position, w=a(), n=torch.zeros(1, dtype=torch.int64)),
}


@pytest.mark.parametrize("backend", short(BACKENDS, "eager"))
def test_other_state(backend):
    agree_all(OTHER_STATE, backend)


def writes(self, c, x):
    self.b[1:3] = x[:2]
    c.mul_(-1)


def returning(results):
    def run(self, c, x):
        writes(self, c, x)
        return results(self, c, x)

    return case(run, a(), b=a())


RETURNED = {
    "only": returning(lambda self, c, x: self.b),
    "first": returning(lambda self, c, x: (self.b, x + 1)),
    "last": returning(lambda self, c, x: (x + 1, c)),
    "both, and twice": returning(lambda self, c, x: (self.b, c, self.b)),
    "views": returning(lambda self, c, x: {"row": self.b[1], "part": c[:, ::2], "flat": self.b.reshape(-1)}),
    "a copy": returning(lambda self, c, x: (self.b.clone(), c.clone(), c)),
    "nothing": returning(lambda self, c, x: None),
    "nothing beside something": returning(lambda self, c, x: (None, x * 2)),
}


@pytest.mark.parametrize("backend", short(BACKENDS, "eager"))
def test_written_state_is_returned(backend):
    agree_all(RETURNED, backend)


@pytest.mark.parametrize("backend", short(BACKENDS, "eager"))
@pytest.mark.parametrize("name", ["only", "nothing"])
def test_a_module_that_only_writes(name, backend):
    result = agree(RETURNED[name], backend)(a(), X[0][0])
    assert (result is None) is (name == "nothing")


@pytest.mark.parametrize("backend", short(BACKENDS, "eager"))
def test_a_returned_buffer_is_the_buffer(backend):
    """A write into the result is a write into the state, as in eager; a returned clone is apart from it."""
    module = Stateful(RETURNED["a copy"].function, b=a())
    cache = a()
    compiled = graft.compile(module, (cache, X[0][0]), backend=backend)
    copied, apart, same = compiled(cache, X[0][0])
    for result in (copied, apart):
        result.fill_(50)
    assert not (module.b == 50).any() and not (cache == 50).any()
    same.fill_(60)
    assert (cache == 60).all() and (apart == 50).all()


FUNCTIONAL = {
    "index_copy": lambda self, c, x: c.index_copy(0, torch.tensor([2, 0]), x[:2]),
    "slice_scatter": lambda self, c, x: torch.slice_scatter(c, x[:2], 0, 1, 3) + self.b,
    "index_put": lambda self, c, x: torch.index_put(c, (torch.tensor([1]),), x[:1]),
    "scatter": lambda self, c, x: c.scatter(0, torch.tensor([[1] * 6]), x[:1]),
    "clone, then write": lambda self, c, x: c.clone().mul_(2).index_copy_(0, torch.tensor([1]), x[:1]),
    "clone of a buffer, then write": lambda self, c, x: self.b.clone().add_(x),
    "clone of a view, then write a view": lambda self, c, x: c[1:].clone().view(-1)[:6].copy_(x[0]),
    "result kept, argument kept": lambda self, c, x: (c.index_fill(0, torch.tensor([1]), 7), c, self.b + 0),
}


@pytest.mark.parametrize("backend", short(BACKENDS, "eager"))
def test_functional_programs_write_nothing(backend):
    """Eager writes nothing, and agree_all holds every cache and buffer to eager's; nor is there an alias."""
    cases = {name: case(function, a(), b=a()) for name, function in FUNCTIONAL.items()}
    for name, subject in cases.items():
        cache, module = a(), Stateful(subject.function, b=a())
        module(cache, X[0][0])
        assert torch.equal(cache, a()) and torch.equal(module.b, a()), name
    assert agree_all(cases, backend).aliases == ()


def original_then_clone(self, c, x):
    kept = c.clone()
    c.add_(x)
    return kept, kept * 2


def clone_through_a_view(self, c, x):
    fork = self.b.clone()
    fork[1:].t().mul_(2)
    self.b[0] = x[0]
    return fork + self.b


def view_read_after_the_clone_is_written(self, c, x):
    row, fork = c[1], c.clone()
    fork.fill_(3)
    return row * 2, fork


def forks(self, c, x):
    fork = c.clone()
    c.mul_(2)
    fork.index_put_((torch.tensor([1, 3]),), x[:2])
    return fork


def scatter_kept(self, c, x):
    kept = c.index_copy(0, torch.tensor([1, 2]), x[:2])
    c.copy_(x)
    return kept


def copied_to_another(self, c, x):
    self.b.copy_(c)
    c.neg_()
    return self.b + c


def overlapping(self, c, x):
    left, right = c[:3], c[1:]
    left.add_(1)
    right.mul_(2)
    left[1:] = right[:2] - x[:2]
    return left * right


def shift_by_one(self, c, x):
    c[1:] = c[:-1].clone()
    self.b[:, 1:] = self.b[:, :-1] + 1
    return c + 0


def swap_halves(self, c, x):
    top = c[:2].clone()
    c[:2], c[2:] = c[2:].clone(), top
    return top


def old_view_of_new(self, c, x):
    row = c[0]
    c.copy_(x)
    return row, row + 1


TRAPS = {
    f.__name__: case(f, a(), b=a())
    for f in (
        original_then_clone,
        clone_through_a_view,
        view_read_after_the_clone_is_written,
        forks,
        scatter_kept,
        copied_to_another,
        overlapping,
        shift_by_one,
        swap_halves,
        old_view_of_new,
    )
}


@torch.library.custom_op("state_kinds::add_twice_", mutates_args=("x", "y"))
def add_twice_(x: torch.Tensor, y: torch.Tensor, by: torch.Tensor) -> None:
    x.add_(by)
    y.add_(by)


@torch.library.custom_op("state_kinds::accumulate_", mutates_args=("x",))
def accumulate_(old: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x + old


add_twice_.register_fake(lambda x, y, by: None)
accumulate_.register_fake(lambda old, x: torch.empty_like(x))


def clone_and_original(self, c, x):
    return torch.ops.state_kinds.accumulate_(c.clone(), c)


def two_views(self, c, x):
    torch.ops.state_kinds.add_twice_(c[:2], self.b[1:3], x[:2])
    torch.ops.state_kinds.add_twice_(c[0], c[1], x[0])
    return c * self.b


TRAPS |= {f.__name__: case(f, a(), b=a()) for f in (clone_and_original, two_views)}


@pytest.mark.some(1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_clones_views_and_old_values(backend):
    agree_all(TRAPS, backend)


@pytest.mark.parametrize("backend", short(BACKENDS, "eager"))
def test_two_inputs_in_one_memory_are_right_or_refused(backend):
    """Each pair is compiled anew. AOTAutograd's cache has the code for other pairs by then, which would be wrong."""

    def run(self, k, v, x):
        k[1] = x[0]
        v[2] = x[1] + k[1]
        return k + v

    pairs = [(slice(0, 4), slice(5, 9)), (slice(0, 4), slice(0, 4)), (slice(0, 4), slice(1, 5))]
    for left, right in pairs:
        torch._dynamo.reset()
        compiled = graft.compile(Stateful(run), (a(), a(), X[0][0]), backend=backend)
        owner, other = whole(9, 6, seed=3), whole(9, 6, seed=3)
        try:
            result = compiled(owner[left], owner[right], X[0][0])
        except GraftError:
            assert torch.equal(owner, whole(9, 6, seed=3)), "refused after something was written"
            assert (left, right) != pairs[0], "the two parts do not overlap"
        else:
            expected = run(None, other[left], other[right], X[0][0])
            assert torch.equal(result, expected) and torch.equal(owner, other), (left, right)


@pytest.mark.parametrize("backend", short(BACKENDS, "eager"))
def test_a_buffer_passed_as_an_input_is_right_or_refused(backend):
    def run(self, c, x):
        self.b[1] = x[0]
        return c[:2] * 2 + self.b[1:3]

    module, expected = (Stateful(run, b=a()) for _ in range(2))
    compiled = graft.compile(module, (a(), X[0][0]), backend=backend)
    compiled(a(), X[0][0])
    expected(a(), X[0][0])
    try:
        result = compiled(module.b, X[1][0])
    except GraftError:
        return
    assert torch.equal(result, expected(expected.b, X[1][0])) and torch.equal(module.b, expected.b)


# ── buffers assigned anew ───────────────────────────────────────────────────────────────────────────────────────


def assign(self, x):
    self.h = torch.slice_scatter(self.h, x[:1], 0, 1, 2)
    return self.h.sum(0)


def assign_and_keep(self, x):
    old = self.h[1]
    self.h = self.h * -1 + x
    return old, self.h


def swap(self, x):
    self.h, self.g = self.g, self.h
    return self.h + x


ASSIGNED = {f.__name__: case(f, h=a(), g=a() + 1) for f in (assign, assign_and_keep, swap)}


@pytest.mark.parametrize("backend", short(BACKENDS, "eager"))
def test_buffers_assigned_anew_in_a_submodule(backend):
    agree_all(ASSIGNED, backend)


@pytest.mark.parametrize("name", ASSIGNED)
def test_buffers_assigned_anew_in_the_module_itself(name):
    agree(ASSIGNED[name], "eager")


def test_an_assignment_that_is_no_write_is_refused():
    def grow(self, x):
        self.h = torch.cat((self.h, x))
        return x * 1

    with pytest.raises(CaptureError, match=r"assigns torch.float32 \(8, 6\) .* to the buffer h"):
        graft.compile(Stateful(grow, h=a()), X[0])
    tied = a()
    with pytest.raises(CaptureError, match="shares its memory with another tensor of the module"):
        graft.compile(Stateful(assign, h=tied, g=tied[:]), X[0])
