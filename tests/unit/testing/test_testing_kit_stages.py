"""The testing kit on the stages of torch.compile: each helper holds, and fails where it should, with the reason."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._inductor.async_compile import AsyncCompile

import stage_programs as programs
from graft.stages import watch
from graft.testing import (
    assert_compiled_like_eager,
    assert_cudagraphed,
    assert_fused_together,
    assert_kernel_count,
    assert_no_copies,
    assert_no_graph_breaks,
    assert_no_recompiles,
    autotune_choices,
    cache_round_trip,
    generated_kernels,
    matrix,
    post_grad_graph,
    round_trip,
)
from graft.testing.plugin import stage_problem

X = torch.linspace(-1, 1, 32).reshape(4, 8)


def chain(x):
    y = x.sin() * 2
    return y.cos() + y


def written(cache, x):
    cache.add_(x)
    return cache.sum(-1)


def copied(cache, x):
    cache.copy_(x @ x.t() @ x)
    return x * 2


def sorted_between(x):
    y = x.sin()
    values = torch.sort(y)[0]
    return values.cos()


def test_graph_breaks():
    assert_no_graph_breaks(chain, X)
    with pytest.raises(AssertionError, match=r"2 graphs, 1 breaks\n  stage_programs\.py:\d+: .*print"):
        assert_no_graph_breaks(programs.printed, X)


def test_a_program_that_raises_is_told():
    with pytest.raises(AssertionError, match=r"compiles and runs\n.*ValueError: not today"):
        assert_no_graph_breaks(programs.raises, X)


def test_kernels_are_counted():
    assert_kernel_count(chain, X, count=1)
    with pytest.raises(AssertionError, match="1 kernels launched\nfound:    2"):
        assert_kernel_count(sorted_between, X, count=1)


def test_what_is_fused_together():
    assert_fused_together(chain, (X,), "%sin", "%cos")
    with pytest.raises(AssertionError, match="one kernel for %sin and %cos\nfound:    no kernel has them all"):
        assert_fused_together(sorted_between, (X,), "%sin", "%cos")
    with pytest.raises(ValueError, match="name two or more"):
        assert_fused_together(chain, (X,), "%sin")


def test_copies():
    assert_no_copies(written, torch.zeros(4, 8), X)
    with pytest.raises(AssertionError, match=r"128 bytes in 1 copies\n.*is copied into it"):
        assert_no_copies(copied, torch.zeros(4, 8), X)
    assert_no_copies(copied, torch.zeros(4, 8), X, allowed_bytes=128)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU records it")
def test_a_cuda_graph_needs_a_gpu():
    with pytest.raises(AssertionError, match=r"1 of 1 skipped\n.*the graph runs on cpu"):
        assert_cudagraphed(chain, X)


@pytest.mark.exhaustive  # templates are compiled one by one
def test_autotuning_tells_its_choices():
    choices = autotune_choices(torch.nn.Linear(256, 512, bias=False).eval(), torch.randn(64, 256))
    assert choices and list(choices[0].ms.values()) == sorted(choices[0].ms.values()) and len(choices[0].ms) > 1


@matrix(dtypes=("float32",), devices=("cpu",), dynamics=(None, True))
def test_compiled_like_eager(dtype, device, dynamic):
    assert_compiled_like_eager(written, (X, X), dtype=dtype, device=device, dynamic=dynamic, wrong=lambda c, x: c + x)


def test_gradients_are_compared():
    linear = torch.nn.Linear(8, 4)
    assert_compiled_like_eager(linear, (X,), gradients=True, roundings=16, backend="aot_eager")


def other_backend(change):
    """A backend that runs Dynamo's graph and changes its results."""

    def backend(gm, inputs):
        return lambda *args: tuple(change(out) for out in gm(*args))

    return backend


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out: out * 1.001, "the same numbers within 4 roundings"),
        (lambda out: out.t().contiguous().t(), "strides of .* as in eager"),
    ],
)
def test_a_compiler_that_does_other_things_is_found(change, message):
    assert_compiled_like_eager(chain, (X,), backend=other_backend(lambda out: out))
    with pytest.raises(AssertionError, match=message):
        assert_compiled_like_eager(chain, (X,), backend=other_backend(change))


def test_memory_that_is_shared_in_eager_alone_is_found():
    def view(x):
        return x.sin_().t()

    assert_compiled_like_eager(view, (X,), backend="eager")
    with pytest.raises(AssertionError, match=r"shared memory of .* as in eager: .*'result 0', 'argument 0'"):
        assert_compiled_like_eager(view, (X,), backend=other_backend(lambda out: out.t().clone().t()))


def test_a_stage_that_cannot_be_watched_is_a_skip(monkeypatch):
    from graft.stages import watch

    assert stage_problem("scheduling") is None
    assert "there is no such stage; did you mean 'caches'" in stage_problem("cache")
    monkeypatch.setitem(watch.ADAPTERS, "scheduling", ("torch._inductor.scheduler:Gone",))
    assert "has no torch._inductor.scheduler:Gone" in stage_problem("scheduling")


def skipped(x):
    """A break in a loop: Dynamo leaves the whole function uncompiled."""
    for _ in range(2):
        x = x + 1
        print("step")
    return x


def layers(x, w):
    for _ in range(2):
        x = torch.tanh(x) @ w
    return x


def by_name(x, which):
    print("a break")
    return MORE[which](x)


MORE = {"sin": lambda x: x.sin(), "cos": lambda x: x.cos()}


@pytest.mark.parametrize("check", [assert_no_copies, lambda f, x: assert_kernel_count(f, x, count=0)])
def test_nothing_holds_of_what_is_not_compiled(check):
    with pytest.raises(
        AssertionError, match=r"is compiled, and seen\n.*nothing was compiled(.*\n)+.*graph break in loop"
    ):
        check(skipped, X)
    with pytest.raises(AssertionError, match="Dynamo made no graph"):
        assert_compiled_like_eager(skipped, (X,))
    with pytest.raises(AssertionError, match="Dynamo made no graph"):
        assert_no_recompiles(skipped, [(X,), (X,)])


def test_nothing_holds_of_a_stage_that_is_not_watched(monkeypatch):
    monkeypatch.setitem(watch.ADAPTERS, "scheduling", ("torch._inductor.scheduler:Gone",))
    with pytest.raises(AssertionError, match=r"is compiled, and seen\n.*has no torch._inductor.scheduler:Gone"):
        assert_no_copies(chain, X)


def test_two_launches_of_one_kernel_are_not_one_kernel(monkeypatch):
    """Equal layers launch the same code; matmuls are calls by one name."""
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_args, **_kwargs: lambda *_given: None)
    w = torch.eye(8)
    for pair in (("%tanh", "%tanh_1"), ("%mm", "%mm_1")):
        with pytest.raises(AssertionError, match="no kernel has them all"):
            assert_fused_together(layers, (X, w), *pair)
    assert_fused_together(chain, (X,), "%sin", "%cos")


def test_a_frame_that_no_call_came_to_before_is_compiled_anew():
    assert_no_recompiles(by_name, [(X, "sin"), (X, "sin")])
    with pytest.raises(AssertionError, match=r"call 2 .* compiled again"):
        assert_no_recompiles(by_name, [(X, "sin"), (X, "cos")])


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen.add_(1)
        return x * 2, 3


def test_buffers_and_results_that_are_no_tensors_are_compared():
    def backend(gm, _inputs):
        def run(*args):
            return [one.clone() for one in gm(*[arg.clone() for arg in args])]  # writes to a copy

        return run

    assert_compiled_like_eager(Counting(), (X,), backend="eager")
    with pytest.raises(AssertionError):
        assert_compiled_like_eager(Counting(), (X,), backend=backend)


def half(x):
    return skipped(x.sin()).cos()


@pytest.mark.parametrize(
    "look", [generated_kernels, post_grad_graph, lambda f, x: assert_fused_together(f, (x,), "%a", "%b")]
)
def test_there_is_nothing_to_look_at_in_what_is_not_compiled(look):
    with pytest.raises(AssertionError, match=r"is compiled"):
        look(skipped, X)


def test_a_part_that_runs_uncompiled_is_not_passed_over(monkeypatch):
    """half is compiled in two graphs; what lies between them may copy as it likes."""
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_args, **_kwargs: lambda *_given: None)
    for check in (assert_no_copies, lambda f, x: assert_kernel_count(f, x, count=2)):
        with pytest.raises(AssertionError, match="part of it runs uncompiled"):
            check(half, X)


def test_a_place_that_is_not_there_is_a_failure():
    with pytest.raises(AssertionError, match=r"has %sine\nfound: .*did you mean 'sin'"):
        assert_fused_together(chain, (X,), "%sin", "%sine")


def test_autotuning_that_measures_nothing_is_a_failure(monkeypatch):
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_args, **_kwargs: lambda *_given: None)
    with pytest.raises(AssertionError, match="autotuning had nothing to choose"):
        autotune_choices(chain, X)


def keeps(x, kept):
    kept.append(x + 1)
    return x * 2


def test_what_is_put_into_a_list_is_compared():
    assert_compiled_like_eager(keeps, (X, []), backend="eager")
    with pytest.raises(AssertionError, match="the same numbers"):
        assert_compiled_like_eager(keeps, (X, []), backend=other_backend(lambda out: out + (out - X - 1 == 0) * 1.0))


class Writes(torch.nn.Module):
    """Returns what it wrote: the second of two calls on the same arguments would give the first one's result."""

    def forward(self, x):
        return x.add_(1)


def test_a_cache_that_gives_something_else_is_found_where_results_are_arguments(monkeypatch):
    x, counted = torch.zeros(4), itertools.count()
    monkeypatch.setattr(round_trip, "cache_counts", lambda: {"hit": next(counted), "miss": 0, "bypass": 0})
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)
    trip = cache_round_trip(Writes(), (x,), route="inductor")
    assert torch.equal(trip.first, torch.ones(4)) and torch.equal(trip.second, torch.ones(4)) and not x.any()
    monkeypatch.setattr(torch, "compile", lambda module, **_: lambda x: module(x).add_(next(counted)))
    with pytest.raises(AssertionError, match="the same bits after a round trip"):
        cache_round_trip(Writes(), (x,), route="inductor")
