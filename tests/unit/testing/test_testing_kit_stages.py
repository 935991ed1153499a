"""The testing kit on the stages of torch.compile: each helper holds, and fails where it should, with the reason."""

from __future__ import annotations

import pytest
import torch

import stage_programs as programs
from graft.testing import (
    assert_compiled_like_eager,
    assert_cudagraphed,
    assert_fused_together,
    assert_kernel_count,
    assert_no_copies,
    assert_no_graph_breaks,
    autotune_choices,
    matrix,
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
