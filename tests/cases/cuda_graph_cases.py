"""Programs with state, and what must hold when they are replayed: the same cases on CPU and on CUDA."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial

import torch
from torch import nn

import graft

DIM, LENGTH = 8, 16
BATCH = {0: torch.export.Dim.DYNAMIC}
# compiled graphs may run other kernels than the module: a few roundings of float32, far below a lost write
assert_close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


class Attend(nn.Module):
    """One step of attention; x [b, 1, d], k and v [b, s, d], pos [1]: writes row `pos`, reads rows up to it."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)

    def step(self, x, k, v, pos):
        q, new_k, new_v = self.qkv(x).chunk(3, -1)
        k.index_copy_(1, pos, new_k)
        v.index_copy_(1, pos, new_v)
        scores = (q @ k.transpose(1, 2)).masked_fill(torch.arange(LENGTH, device=x.device) > pos, float("-inf"))
        return scores.softmax(-1) @ v

    def forward(self, x, k, v, pos):
        return self.step(x, k, v, pos)


class OwnCaches(Attend):
    """The same with buffers, at a position that it counts itself."""

    def __init__(self):
        super().__init__()
        for name in ("k", "v"):
            self.register_buffer(name, torch.zeros(2, LENGTH, DIM))
        self.register_buffer("pos", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        y = self.step(x, self.k, self.v, self.pos)
        self.pos.add_(1)
        return y


class Returns(nn.Module):
    """Everything that a result can be: a written input, views of it, of a plain input and of state, new memory."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("scale", torch.full((3, 4), 2.0))

    def forward(self, x, cache):
        self.total.add_(x.sum(0))
        cache[:, 1].copy_(x)
        product = x * self.scale[0]
        return {
            "cache": cache,
            "row": cache[:, 1],
            "x": x,
            "transposed": x.t(),
            "total": self.total,
            "scale": self.scale[1],
            "new": (product, product[0], x + 1),
            "wide": x.sum().expand(5),
            "none": None,
        }


def seeded(kind, device):
    torch.manual_seed(0)
    return kind().to(device).eval()


def caches(device, batch=2):
    return [torch.zeros(batch, LENGTH, DIM, device=device) for _ in range(2)]


def token(step, device, batch=2):
    """x [b, 1, d]; another at every step."""
    return torch.randn(batch, 1, DIM, generator=torch.Generator().manual_seed(step)).to(device)


def at(step, device):
    return torch.tensor([step], device=device)


def compiled_attend(device, **options):
    """The module, and its compiled copy for any batch."""
    module = seeded(Attend, device)
    shapes = {"x": BATCH, "k": BATCH, "v": BATCH, "pos": None}
    example = (token(0, device), *caches(device), at(0, device))
    compiled = graft.compile(copy.deepcopy(module), example, dynamic_shapes=shapes, backend="cuda_graph", **options)
    return module, compiled


@torch.no_grad()
def check_steps(module, compiled, ours, theirs, steps, device, batch=2):
    for step in steps:
        x, pos = token(step, device, batch), at(step, device)
        assert_close(compiled(x, *ours, pos), module(x, *theirs, pos))
        assert_close(ours, theirs)


def caller_owned_caches(device):
    module, compiled = compiled_attend(device)
    ours, theirs = caches(device), caches(device)
    pointers = [cache.data_ptr() for cache in ours]
    check_steps(module, compiled, ours, theirs, range(10), device)
    assert [cache.data_ptr() for cache in ours] == pointers
    assert compiled.replays.events == ("capture 1: first call",)
    # x [2, 1, 8] of 4 bytes and pos [1] of 8: nothing of the caches is staged
    assert compiled.replays.staged_bytes == 10 * (2 * DIM * 4 + 8)


@torch.no_grad()
def module_owned_buffers(device):
    module = seeded(OwnCaches, device)
    compiled = graft.compile(copy.deepcopy(module), (token(0, device),), backend="cuda_graph")
    state = compiled.graph_module
    for step in range(10):
        x = token(step, device)
        assert_close(compiled(x), module(x))
        # after the first call too: warm-up and capture counted for nothing
        assert state.pos.item() == module.pos.item() == step + 1
        assert_close((state.k, state.v), (module.k, module.v))
    assert compiled.replays.count == 1


@torch.no_grad()
def a_capture_at_the_last_position(device):
    """Warming up runs it several times: its own counter must not lead beyond the end of the cache."""
    module = seeded(OwnCaches, device)
    compiled = graft.compile(copy.deepcopy(module), (token(0, device),), backend="cuda_graph")
    for state in (module, compiled.graph_module):
        state.pos.fill_(LENGTH - 1)
    assert_close(compiled(token(0, device)), module(token(0, device)))
    state = compiled.graph_module
    assert_close((state.k, state.v, state.pos), (module.k, module.v, module.pos))


def alternating_caches(device):
    module, compiled = compiled_attend(device)
    ours, theirs = [caches(device) for _ in range(2)], [caches(device) for _ in range(2)]
    for step in range(10):
        check_steps(module, compiled, ours[step % 2], theirs[step % 2], [step], device)
        assert_close(ours, theirs)  # the other pair was not written
    assert compiled.replays.events == (
        "capture 1: first call",
        "capture 2: input k: another tensor; input v: another tensor",
    )


def new_shapes(device):
    module, compiled = compiled_attend(device)
    pairs = {batch: (caches(device, batch), caches(device, batch)) for batch in (2, 3)}
    for step in range(10):
        batch = 2 + step % 2
        check_steps(module, compiled, *pairs[batch], [step], device, batch)
    assert compiled.replays.count == compiled.replays.alive == 2
    assert "input x: new shape (3, 1, 8), was (2, 1, 8)" in compiled.replays.events[1]


def another_view_of_the_same_memory(device):
    """A capture holds for every tensor of the same address and layout."""
    module, compiled = compiled_attend(device)
    ours, theirs = caches(device), caches(device)
    for step in range(3):
        check_steps(module, compiled, [cache.view_as(cache) for cache in ours], theirs, [step], device)
    assert compiled.replays.count == 1


def caches_that_are_slices(device):
    module, compiled = compiled_attend(device)
    whole, theirs = torch.zeros(2, 2, 2 * LENGTH, DIM, device=device), caches(device)
    ours = list(whole[:, :, LENGTH:])  # two of [2, 16, 8], not contiguous, in one storage
    check_steps(module, compiled, ours, theirs, range(10), device)
    assert compiled.replays.count == 1 and not whole[:, :, :LENGTH].any()


@torch.no_grad()
def results_as_in_eager(device):
    module = seeded(Returns, device)
    example = (torch.randn(2, 4, device=device), torch.zeros(2, 3, 4, device=device))
    compiled = graft.compile(copy.deepcopy(module), example, backend="cuda_graph")
    ours, theirs, kept = torch.zeros(2, 3, 4, device=device), torch.zeros(2, 3, 4, device=device), []
    for step in range(10):
        x = torch.full((2, 4), float(step), device=device)
        got, expected = compiled(x, ours), module(x, theirs)
        assert_close(got, expected)
        kept.append((got["new"], [part.clone() for part in expected["new"]]))
        assert got["cache"] is ours and got["x"] is x
        assert got["row"].data_ptr() == ours[:, 1].data_ptr()
        assert got["transposed"].data_ptr() == x.data_ptr() and got["transposed"].stride() == (1, 4)
        assert got["total"] is compiled.graph_module.total
        assert got["scale"].data_ptr() == compiled.graph_module.scale[1].data_ptr()
        product, first, _ = got["new"]
        assert product.data_ptr() == first.data_ptr() != got["new"][2].data_ptr()  # they share memory, as in eager
    for got, expected in kept:  # nine replays later
        assert_close(list(got), expected)
    assert compiled.replays.count == 1


@torch.no_grad()
def outputs_outlive_the_next_replay(device):
    _, compiled = compiled_attend(device)
    k, v = caches(device)
    first = compiled(token(0, device), k, v, at(0, device))
    kept = first.clone()
    second = compiled(token(1, device), k, v, at(1, device))
    assert torch.equal(first, kept) and not torch.equal(second, kept)
    assert first.data_ptr() != second.data_ptr()


@torch.no_grad()
def reused_outputs_are_overwritten(device):
    module, compiled = compiled_attend(device, reuse_outputs=True)
    ours, theirs = caches(device), caches(device)
    first = compiled(token(0, device), *ours, at(0, device))
    kept = first.clone()
    module(token(0, device), *theirs, at(0, device))
    second = compiled(token(1, device), *ours, at(1, device))
    assert_close(second, module(token(1, device), *theirs, at(1, device)))
    assert first.data_ptr() == second.data_ptr() and not torch.equal(first, kept)
    assert_close(ours, theirs)


@torch.no_grad()
def replaced_buffer(device):
    module = seeded(OwnCaches, device)
    compiled = graft.compile(copy.deepcopy(module), (token(0, device),), backend="cuda_graph")
    for step in range(6):
        if step == 3:
            old, before = compiled.graph_module.k, compiled.graph_module.k.clone()
            compiled.graph_module.k, module.k = torch.ones_like(old), torch.ones_like(old)
        x = token(step, device)
        assert_close(compiled(x), module(x))
        assert_close(compiled.graph_module.k, module.k)
    assert torch.equal(old, before)
    assert compiled.replays.events[1:] == ("capture 2: state k: buffer was replaced",)


@torch.no_grad()
def bounded_captures(device):
    module, compiled = compiled_attend(device)
    ours, theirs = [caches(device) for _ in range(10)], [caches(device) for _ in range(10)]
    for index in [*range(10), 0, 9]:
        check_steps(module, compiled, ours[index], theirs[index], [index], device)
    assert compiled.replays.alive == 8
    assert compiled.replays.count == 11  # the first pair had been dropped, the last one not
    assert compiled.replays.events[8].endswith("the least recently used of 8 is dropped")


@torch.no_grad()
def caches_are_not_kept_alive(device):
    _, compiled = compiled_attend(device)
    k, v = caches(device)
    y = compiled(token(0, device), k, v, at(0, device))
    alive = [weakref.ref(cache.untyped_storage()) for cache in (k, v)] + [weakref.ref(cache) for cache in (k, v)]
    assert None not in [ref() for ref in alive]
    del k, v
    gc.collect()
    assert [ref() for ref in alive] == [None] * 4 and y.shape == (2, 1, DIM)


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


@torch.no_grad()
def random_numbers(device):
    x = torch.zeros(64, device=device)
    compiled = graft.compile(Noise(), (x,), backend="cuda_graph")
    torch.manual_seed(5)
    expected = [Noise()(x) for _ in range(4)]
    torch.manual_seed(5)
    for wanted in expected[:3]:
        assert torch.equal(compiled(x), wanted)
    assert torch.equal(Noise()(x), expected[3])  # the generator stands where eager's does


class Windows(nn.Module):
    def forward(self, x, rows, n, *, options):
        return [x * n + rows.sum(-1), options["a"] - x]


@torch.no_grad()
def containers_and_layouts(device):
    """Keyword arguments, containers, numbers, expanded and overlapping inputs."""
    narrow, row = torch.randn(3, 1, device=device), torch.randn(8, device=device)
    rows = row.unfold(0, 4, 2)  # [3, 4], rows overlap
    args, kwargs = (narrow.expand(3, 3), rows, 2), {"options": {"a": torch.randn(3, 3, device=device)}}
    compiled = graft.compile(Windows(), args, kwargs, backend="cuda_graph")
    for step in range(3):
        narrow.fill_(step)
        row.fill_(step + 1)
        got = compiled(*args, **kwargs)
        assert isinstance(got, list)
        assert_close(got, Windows()(*args, **kwargs))
    assert compiled.replays.count == 1
    assert compiled.replays.staged_bytes == 3 * 4 * (3 + 8 + 9)  # memory, not elements


CASES = [
    caller_owned_caches,
    module_owned_buffers,
    a_capture_at_the_last_position,
    alternating_caches,
    new_shapes,
    another_view_of_the_same_memory,
    caches_that_are_slices,
    results_as_in_eager,
    outputs_outlive_the_next_replay,
    reused_outputs_are_overwritten,
    replaced_buffer,
    bounded_captures,
    caches_are_not_kept_alive,
    random_numbers,
    containers_and_layouts,
]
