"""Kernels of generated code as they run: times alone, what each launch wrote, indices that are checked."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import stage_programs as programs
from graft.stages import kernel_times
from graft.stages.kernel_times import CHANGES, MeasuredKernel, averaged, measure_launches, middle, resources
from graft.stages.kernels import GeneratedKernel
from graft.stages.launches import NotedLaunch, argument_text, parameter_names, value_record
from graft.stages.story import Story
from graft.stages.tell import tell_story
from graft.workbench.stages.apart import tell_apart
from graft.workbench.stages.text import story_lines

CHECKED = {"assert_indirect_indexing": True, "debug_index_asserts": True}


@pytest.fixture(scope="module")
def step() -> Story:
    return tell_story(programs.step, programs.step_inputs(), values=True)


@pytest.fixture(scope="module")
def counted() -> Story:
    return tell_story(programs.counted, programs.counted_inputs(), values=True)


def test_every_kernel_of_a_call_is_timed_alone(step):
    assert step.kernels.kernels and all(one.us > 0 and not one.not_timed for one in step.kernels.kernels)
    assert all(one.us_range[0] <= one.us <= one.us_range[1] for one in step.kernels.kernels)
    mm = next(one for one in step.kernels.kernels if one.name == "extern_kernels.mm")
    assert mm.arguments[:2] == ("float32[4, 8] (8, 1) cpu", "float32[8, 16] (16, 1) cpu")
    assert mm.arguments[2] == "out=float32[4, 16] (16, 1) cpu"
    assert set(step.kernels.code) == {"0/0"} and "extern_kernels.mm(" in step.kernels.code["0/0"]


def test_what_launches_wrote_is_told_in_their_order(step):
    found = [(one.kernel, one.name) for one in step.runtime.values]
    mm = next(one for one in step.runtime.values if one.kernel == "extern_kernels.mm")
    y = torch.nn.functional.silu(torch.ones(4, 8)) @ torch.ones(8, 16)
    assert mm.least == mm.largest == pytest.approx(y[0, 0].item()) and mm.name == "out" and not mm.not_finite
    assert [name for name, _ in found].index("extern_kernels.mm") > 0  # behind the kernel that it reads
    assert any(name.startswith("out_ptr") for _, name in found)


def test_a_kernel_that_counts_is_not_called_again_and_again(counted):
    assert counted.end is None
    kernels = {one.not_timed for one in counted.kernels.kernels}
    assert CHANGES in kernels  # position + 1 would leave x after two calls
    odd = [one for one in counted.runtime.values if one.not_finite]
    assert [one.not_finite for one in odd] == [1]  # log(0)


def test_an_index_out_of_bounds_is_told_with_its_kernel():
    """In a process of its own: on some machines the exception that the generated C++ throws ends the process."""

    def make(keeper):
        return tell_story(programs.picked, programs.picked_inputs(), options=CHECKED, keeper=keeper)

    story = tell_apart(make, "picked")
    assert story.end is not None and story.end.stage == 6 and "cpp_fused_index_mul_0" in str(story.end)
    if "the process was ended by" in story.end.error:
        assert "indices are checked in" in story.end.error
    else:
        assert "index out of bounds" in story.end.error and story.end.doing.startswith("running call 1, in cpp_fused")


def test_a_call_that_cannot_be_repeated_says_why():
    calls = []

    def once(x):
        calls.append(x)
        raise RuntimeError("only once\nmore")

    found = measure_launches({"once": NotedLaunch("once", once, (torch.ones(2),), {})})["once"]
    assert found.us == 0 and found.problem == "RuntimeError: only once" and len(calls) == 1


def test_numbers_that_a_launch_changes_are_put_back():
    position = torch.ones(1, dtype=torch.int64)
    found = measure_launches({1: NotedLaunch("count", lambda x: x.mul_(2), (position,), {})})[1]
    assert found.problem == CHANGES and position.item() == 1


def test_a_time_is_a_median_with_the_range_of_its_readings(monkeypatch):
    """One reading in ten may be anything: the machine did something else."""
    assert middle([1e-6] * 9 + [5e-3]) == (1.0, (1.0, 1.0))
    assert middle([1e-6, 2e-6, 3e-6, 4e-6, 5e-6]) == (3.0, (1.0, 5.0))
    calls: list[str] = []
    readings = {"a": iter([[1e-6] * 4, [3e-6] * 4, [1e-6] * 4, [3e-6] * 4]), "b": iter([[7e-6] * 4] * 4)}

    def times(launch, *_rest, **_more):
        calls.append(launch.name)
        return next(readings[launch.name])

    monkeypatch.setattr(kernel_times, "call_times", times)
    found = measure_launches({name: NotedLaunch(name, lambda: None, (), {}) for name in "ab"})
    assert calls == ["a", "b"] * 4  # in turn, and not one after the other
    assert (found["a"].us, found["a"].us_range, found["b"].us_range) == (2.0, (1.0, 3.0), (7.0, 7.0))


def test_launches_with_other_shapes_have_times_of_their_own():
    """15 matmuls of a decoder are not 15 times its first."""
    small, large = (MeasuredKernel(us, us_range=(us - 1, us + 1), arguments=(str(us),)) for us in (10.0, 40.0))
    found = averaged([(2, small), (1, large)])
    assert (found.us, found.us_range, found.shapes, found.arguments) == (20.0, (19.0, 21.0), 2, ("10.0",))
    assert averaged([(3, small)]) == small
    failed = averaged([(2, small), (1, MeasuredKernel(problem="no"))])
    assert (failed.us, failed.problem) == (0.0, "no")

    def two(x, w, v):
        return x @ w @ v

    story = tell_story(two, [(torch.ones(4, 8), torch.ones(8, 16), torch.ones(16, 2))])
    (mm,) = story.kernels.kernels
    assert (mm.launches, mm.shapes) == (2, 2) and mm.us > 0
    told = [line.text for line in story_lines(story, 5)]
    assert any("2 launches with 2 shapes" in line and "each on average" in line for line in told), told


def test_resources_of_a_triton_kernel():
    config = SimpleNamespace(kwargs={"XBLOCK": 128}, num_warps=4, num_stages=1)
    launcher = SimpleNamespace(n_regs=32, n_spills=0, shared=512, config=config)

    class Autotuner:
        launchers = (launcher,)

        def run(self):
            return None

    assert resources(Autotuner().run) == {
        "registers": 32, "spills": 0, "shared": 512, "tile": "XBLOCK 128, num_warps 4, num_stages 1",
    }  # fmt: skip
    assert resources(torch.mm) == {}


def test_parameters_of_kernels():
    cpp = 'extern "C"  void  kernel(const float* in_ptr0,\n   float* __restrict__ out_ptr0,\n  const int64_t ks0)'
    assert parameter_names(GeneratedKernel("k", "cpp", cpp)) == ["in_ptr0", "out_ptr0", "ks0"]
    triton = "@triton.jit\ndef triton_poi_0(in_out_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):\n"
    assert parameter_names(GeneratedKernel("k", "triton", triton)) == ["in_out_ptr0", "out_ptr0", "xnumel", "XBLOCK"]


def test_values_where_nothing_is_finite():
    record = value_record("0/0", "k", "out", torch.tensor([float("nan"), float("inf")]))
    assert (record.least, record.mean, record.not_finite) == (None, None, 2)
    assert argument_text(torch.zeros(2, 3).t()) == "float32[3, 2] (1, 3) cpu" and argument_text(4) == "4"


def test_values_of_complex_numbers_are_their_absolute_values():
    record = value_record("0/0", "k", "out", torch.tensor([3 + 4j, -1 + 0j, complex(float("nan"), 0)]))
    assert (record.least, record.largest, record.not_finite) == (1, 5, 1) and "absolute values" in record.type
