"""Every form in which a cache is written, whoever owns it: as in eager, in place, over several steps."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import graft
from marks import FULL, short
from state_cases import BACKENDS, Case, Stateful, agree, agree_all, whole

B, H, S, D = 2, 2, 8, 4
POSITIONS = ([0, 3], [4, 1], [2, 7])


def at(step):
    return torch.tensor(POSITIONS[step])


def in_rows(index, cache, dim):
    """Positions as an index for scatter: along `dim`, the same for all other places."""
    shape = [1] * cache.dim()
    shape[dim] = len(index)
    sizes = list(cache.shape)
    sizes[dim] = len(index)
    return index.view(shape).expand(sizes)


def two_writes(cache, x, index):
    cache.index_copy_(2, index, x)
    cache[:, :, index] = x * 2


def write_read_write(cache, x, index):
    cache.index_copy_(2, index, x)
    cache.index_copy_(2, index + 0, cache[:, :, 1:3] * 2 + cache.sum(2, keepdim=True))


def old_value_later(cache, x, index):
    old = cache[:, :, :2]
    kept = old.clone()
    cache.index_copy_(2, index, x)
    cache[:, :, 4:6].copy_(kept + old)


# cache [B, H, S, D], x [B, H, 2, D], index [2]
FORMS = {
    "slice assigned": lambda c, x, i: c.__setitem__((slice(None), slice(None), slice(3, 5)), x),
    "copy_ into a slice": lambda c, x, i: c[:, :, 3:5].copy_(x),
    "copy_ into narrow": lambda c, x, i: c.narrow(-2, 3, 2).copy_(x),
    "copy_ into select": lambda c, x, i: c.select(2, 3).copy_(x[:, :, 0]),
    "in-place arithmetic on a view": lambda c, x, i: c[:, 1:, 2:4].add_(x[:, :1]).mul_(2).clamp_(-9, 9),
    "index_copy_ dim 2": lambda c, x, i: c.index_copy_(2, i, x),
    "index_copy_ dim -2": lambda c, x, i: c.index_copy_(-2, i, x),
    "index_copy_ dim 1 of a transposed view": lambda c, x, i: c.transpose(1, 2).index_copy_(1, i, x.transpose(1, 2)),
    "index assigned": lambda c, x, i: c.__setitem__((slice(None), slice(None), i), x),
    "index_put_ of rows": lambda c, x, i: c.transpose(0, 2).index_put_((i,), x.transpose(0, 2)),
    "index_put_ accumulated": lambda c, x, i: c.transpose(0, 2).index_put_((i,), x.transpose(0, 2), accumulate=True),
    "index_add_": lambda c, x, i: c.index_add_(2, i, x),
    "scatter_": lambda c, x, i: c.scatter_(2, in_rows(i, c, 2), x),
    "slice_scatter": lambda c, x, i: c.copy_(torch.slice_scatter(c, x, 2, 3, 5)),
    "slice_scatter dim -2": lambda c, x, i: c.copy_(torch.slice_scatter(c, x, -2, 3, 5)),
    "select_scatter": lambda c, x, i: c.copy_(torch.select_scatter(c, x[:, :, 0], 2, 3)),
    "index_copy": lambda c, x, i: c.copy_(c.index_copy(2, i, x)),
    "index_put": lambda c, x, i: c.transpose(0, 2).copy_(c.transpose(0, 2).index_put((i,), x.transpose(0, 2))),
    "scatter": lambda c, x, i: c.copy_(c.scatter(2, in_rows(i, c, 2), x)),
    "strided": lambda c, x, i: c[:, :, 1::4].copy_(x),
    "strided in two dims": lambda c, x, i: c[:, :, ::4, ::2].copy_(x[..., :2]),
    "full overwrite": lambda c, x, i: c.copy_(x[:, :, :1]),
    "full overwrite by a slice": lambda c, x, i: c.__setitem__(slice(None), x[:, :, 1:]),
    "two writes": two_writes,
    "write, read, write": write_read_write,
    "old value needed later": old_value_later,
}


def steps(dtype=torch.float32):
    return [(whole(B, H, 2, D, dtype=dtype, seed=step), at(step)) for step in range(len(POSITIONS))]


def caller_owned(form, dtype=torch.float32):
    def run(self, cache, x, index):
        form(cache, x, index)
        return cache.sum(2), x + 1

    return Case(run, steps(dtype), caches=(whole(B, H, S, D, dtype=dtype, seed=9),))


def module_owned(form, dtype=torch.float32):
    def run(self, x, index):
        form(self.cache, x, index)
        return self.cache.sum(2), x + 1

    return Case(run, steps(dtype), buffers={"cache": whole(B, H, S, D, dtype=dtype, seed=9)})


def mixed(form):
    """K belongs to the caller, V to the module."""

    def run(self, k, x, index):
        form(k, x, index)
        form(self.v, x * 2, index)
        return (k * self.v).sum(2)

    return Case(run, steps(), (whole(B, H, S, D, seed=8),), {"v": whole(B, H, S, D, seed=7)})


OWNERS = {"caller": caller_owned, "module": module_owned, "mixed": mixed}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("owner", "backend"),
    short(product(OWNERS, BACKENDS), ("caller", "eager")),
)
def test_every_form_of_write(owner, backend):
    agree_all({name: OWNERS[owner](form) for name, form in FORMS.items()}, backend)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("backend", short(BACKENDS, "eager"))
def test_caches_of_other_dtypes(dtype, backend):
    names = ("copy_ into a slice", "index_copy_ dim 2", "index assigned", "scatter_", "slice_scatter", "two writes")
    cases = {f"caller, {name}": caller_owned(FORMS[name], dtype) for name in names}
    agree_all(cases | {f"module, {name}": module_owned(FORMS[name], dtype) for name in names}, backend)


def layouts():
    """Caches that are not contiguous, with the memory around them, which must stay as it is."""
    transposed, wide, stacked = whole(B, S, H, D), whole(B, H, S, 3 * D), whole(2, B, H, S, D)
    return {
        "transposed": (transposed, lambda owner: owner.transpose(1, 2)),
        "sliced out of a bigger one": (wide, lambda owner: owner[..., D : 2 * D]),
        "every second position": (whole(B, H, 2 * S, D), lambda owner: owner[:, :, ::2]),
        "one of a stacked pair": (stacked, lambda owner: owner[1]),
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", short(BACKENDS, "eager"))
def test_caches_that_are_not_contiguous(backend):
    """In the short run each layout with one form and each form with one layout."""
    cases, names = {}, ("copy_ into a slice", "index_copy_ dim 2", "index assigned", "slice_scatter", "strided")
    for number, (layout, (owner, view)) in enumerate(layouts().items()):
        for name in names if FULL or number == 0 else names[number : number + 1]:

            def run(self, cache, x, index, form=FORMS[name], view=view):
                form(view(cache), x, index)
                return view(cache).sum(2)

            cases[f"{layout}, {name}, view taken inside"] = Case(run, steps(), caches=(owner,))
            cases[f"{layout}, {name}"] = Case(caller_owned(FORMS[name]).function, steps(), caches=(view(owner),))
    agree_all(cases, backend)


@pytest.mark.parametrize("backend", short(BACKENDS, "eager"))
def test_the_memory_around_a_sliced_cache_stays(backend):
    module = Case(caller_owned(FORMS["index assigned"]).function, steps())
    owner = whole(B, H, S, 3 * D)
    before, x, index = owner.clone(), *module.steps[0]
    compiled = graft.compile(Stateful(module.function), (owner[..., D : 2 * D], x, index), backend=backend)
    assert torch.equal(owner, before)
    compiled(owner[..., D : 2 * D], x, index)
    assert torch.equal(owner[..., :D], before[..., :D]) and torch.equal(owner[..., 2 * D :], before[..., 2 * D :])
    assert torch.equal(owner[:, :, index, D : 2 * D], x)


@pytest.mark.parametrize("backend", short(BACKENDS, "eager"))
def test_two_caches_and_nested_modules(backend):
    """Two layers with a K and a V each, as submodules; forward keeps its signature."""

    class Layer(torch.nn.Module):
        def __init__(self, seed):
            super().__init__()
            self.register_buffer("k", whole(B, H, S, D, seed=seed))
            self.register_buffer("v", whole(B, H, S, D, seed=seed + 1), persistent=False)

        def forward(self, x, index):
            self.k.index_copy_(2, index, x)
            self.v[:, :, index] = x + 1
            return x + (self.k * self.v).sum(2, keepdim=True).clamp(-3, 3)

    layers = [torch.nn.ModuleList([Layer(1), Layer(5)]) for _ in range(2)]

    def run(self, x, index):
        for layer in self.layers:
            x = layer(x, index)
        return x

    modules = [Stateful(run) for _ in layers]
    for module, stack in zip(modules, layers, strict=True):
        module.layers = stack
    compiled = graft.compile(modules[0], steps()[0], backend=backend)
    for args in steps():
        assert torch.equal(compiled(*args), modules[1](*args))
        for left, right in zip(modules[0].buffers(), modules[1].buffers(), strict=True):
            assert torch.equal(left, right)


@pytest.mark.parametrize("backend", short(BACKENDS, "eager"))
def test_a_single_cache_written_and_nothing_else(backend):
    agree(caller_owned(FORMS["copy_ into a slice"]), backend)
