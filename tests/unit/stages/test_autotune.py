"""What autotuning chose from, and why there was nothing to choose. Nothing is compiled by the C++ compiler."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._inductor.async_compile import AsyncCompile

from graft.stages import autotune
from graft.stages.autotune import (
    NO_CALLS,
    NO_CONFIGS,
    NOT_ASKED,
    NOT_TIMED,
    SeenChoices,
    config_text,
    configs_of,
    record_of,
    single_choices,
    tile_of,
    timing,
    why_no_choices,
    why_single,
)
from graft.stages.kernels import template_tile
from graft.stages.needs import Reached
from graft.stages.story import Story
from graft.stages.story_code import AutotuneRecord, KernelRecord, KernelStage, SingleChoice
from graft.stages.tell import tell_story
from graft.workbench.stages.text import story_lines

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Choice(SimpleNamespace):
    """As a key of timings."""

    __hash__ = object.__hash__


MM = Choice(name="mm")


def matmul(x, w):
    return torch.relu(x @ w)


def told(function, *args, **settings) -> Story:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncCompile, "cpp_pybinding", lambda *_args, **_kwargs: lambda *_given: None)
        story = tell_story(function, [args], whole=False, **settings)
    assert story.end is None, story.end
    return story


def texts(story: Story) -> list[str]:
    return [line.text.strip() for line in story_lines(story, 5)]


def test_a_single_choice_has_its_reason():
    story = told(matmul, torch.ones(4, 8), torch.ones(8, 16), mode="max-autotune")
    (single,) = story.kernels.single
    assert (single.graph, single.name) == ("0/0", "mm") and not story.kernels.choices and not story.kernels.autotuning
    assert "templates for a CPU take constant weights, of a module with option freezing=true" in single.reason
    assert f"0/0 nothing to choose for mm: {single.reason}" in texts(story)


def test_without_calls_there_is_nothing_to_choose():
    story = told(lambda x: x.sin() + 1, torch.ones(4), mode="max-autotune")
    assert story.kernels.autotuning == NO_CALLS and NO_CALLS in texts(story) and not story.kernels.single


def test_autotuning_that_is_not_asked_for_is_told_where_it_would_choose():
    story = told(matmul, torch.ones(4, 8), torch.ones(8, 16))
    assert story.kernels.autotuning == NOT_ASKED and NOT_ASKED in texts(story) and not story.kernels.single
    assert told(lambda x: x + 1, torch.ones(4)).kernels.autotuning == ""


@pytest.mark.parametrize(
    ("settings", "call", "device", "reason"),
    [
        ({"max_autotune_gemm_backends": "ATEN"}, "mm", CPU, "max_autotune_gemm_backends has no CPP, only ATEN"),
        ({"max_autotune_gemm_backends": "aten, cpp"}, "mm", CUDA, "has no TRITON, only ATEN, CPP"),
        ({"freezing": True}, "mm", CPU, "no template takes its sizes, dtypes or layouts"),
        ({}, "convolution", CPU, "there is no template for a convolution on a CPU"),
        ({"max_autotune_conv_backends": "ATEN"}, "convolution", CUDA, "max_autotune_conv_backends has no TRITON"),
    ],
)
def test_why_no_template_competes(settings, call, device, reason):
    with torch._inductor.config.patch(settings):
        assert why_single(call, MM, device).startswith("one choice, mm: ")
        assert reason in why_single(call, MM, device)


def test_a_small_gpu_has_no_templates(monkeypatch):
    monkeypatch.setattr("torch._inductor.utils.is_big_gpu", lambda *_: False)
    assert "68 multiprocessors" in why_single("mm", MM, CUDA)
    monkeypatch.setattr("torch._inductor.utils.is_big_gpu", lambda *_: True)
    assert "no template takes" in why_single("mm", MM, CUDA)


def test_single_choices_are_told_where_autotuning_was_asked_for():
    seen = SeenChoices(
        asked={"0/0": True, "1/0": False}, calls=[("0/0", "mm", "w"), ("1/0", "mm", "w"), ("0/0", "bmm", "")]
    )
    assert single_choices(seen) == (SingleChoice("0/0", "mm", "w"),)
    assert why_no_choices(seen, (), "cpu") == "" and why_no_choices(seen, (), "cuda:0") == NO_CONFIGS


def test_choices_that_are_not_timed_are_told():
    seen = SeenChoices(asked={"0/0": True}, calls=[("0/0", "mm", "")])
    assert why_no_choices(seen, (), "cpu") == NOT_TIMED
    seen.timed.append(AutotuneRecord("0/0", "mm", {"mm": 1.0}))
    assert why_no_choices(seen, (), "cpu") == ""


def test_a_torch_without_the_names_is_told(monkeypatch):
    monkeypatch.setattr(autotune, "NEEDS", ("torch._inductor.select_algorithm:Gone",))
    assert "cannot be watched" in why_no_choices(SeenChoices(), (), "cpu")


def test_tiles_of_templates():
    info = {"tile_shape": "(64, 32, 128)", "num_warps": 4, "num_stages": 3}  # as Inductor writes it: M, K, N
    template = SimpleNamespace(info_dict=lambda: info)
    assert tile_of(template) == "BLOCK_M 64, BLOCK_N 128, BLOCK_K 32, num_warps 4, num_stages 3"
    library = SimpleNamespace(info_dict=lambda: {"backend": "extern"})
    assert tile_of(library) == tile_of(object()) == ""
    sizes = {"EVEN_K": True, "BLOCK_M": 64, "BLOCK_N": 32}
    constants = "".join(f"    {name} : tl.constexpr = {size}\n" for name, size in sizes.items())
    source = f"def triton_tem_mm(arg_A):\n{constants}"
    assert template_tile(source) == "BLOCK_M 64, BLOCK_N 32" and template_tile("XBLOCK: tl.constexpr") == ""


def test_a_choice_that_does_not_run_has_no_time():
    fits, large = Choice(name="triton_mm_0"), Choice(name="triton_mm_1")
    record = record_of("0/0", "mm", {large: float("inf"), fits: 0.02, MM: 0.01})
    assert list(record.ms.items()) == [("mm", 0.01), ("triton_mm_0", 0.02)] and record.failed == 1
    lines = texts(Story("f", "inductor", "2.13", "cuda:0", kernels=KernelStage(choices=(record,))))
    assert "0/0 autotuned mm, 2 choices, 1 more cannot be used:" in lines


def launcher(block: int, registers: int, spills: int) -> SimpleNamespace:
    config = SimpleNamespace(kwargs={"XBLOCK": block}, num_warps=4, num_stages=1)
    return SimpleNamespace(config=config, n_regs=registers, n_spills=spills)


def test_configurations_of_kernels_are_told_with_registers_and_spills():
    seen, reached = SeenChoices(), Reached()
    bench = timing(lambda self, one, *_: one.config.kwargs["XBLOCK"] / 1000, seen, reached)
    kernel = SimpleNamespace(inductor_meta={"kernel_name": "triton_poi_0"})
    bench(kernel, launcher(8, 20, 0))  # while it is compiled: not yet a kernel of a graph
    reached.graph = "0/0"
    assert bench(kernel, launcher(256, 32, 0)) == 0.256
    bench(kernel, launcher(128, 64, 8))
    assert timing(lambda *_: float("inf"), seen, reached)(kernel, launcher(512, 255, 64)) == float("inf")
    bench(SimpleNamespace(inductor_meta={"kernel_name": "a_trial"}), launcher(64, 64, 8))
    found = configs_of(seen, [KernelRecord("0/0", "triton_poi_0", "triton")])
    first, second = "XBLOCK 128, num_warps 4, num_stages 1", "XBLOCK 256, num_warps 4, num_stages 1"
    assert found == (
        AutotuneRecord(
            "0/0", "triton_poi_0", {first: 0.128, second: 0.256}, registers={second: 32, first: 64},
            spills={second: 0, first: 8}, failed=1,
        ),
    )  # fmt: skip
    stage = KernelStage(kernels=(KernelRecord("0/0", "triton_poi_0", "triton", tile=first),), configs=found)
    lines = texts(Story("f", "inductor", "2.13", "cuda:0", kernels=stage))
    assert (
        "0/0 autotuned triton_poi_0, 2 choices, 1 more cannot be used:" in lines
        and f"0.1280 ms {first} (64 registers, 8 spilled)" in lines
    )
    assert f"0/0 triton triton_poi_0: 0 nodes, tile {first}" in lines
    assert configs_of(seen, []) == () and config_text(object()) == ""


def test_choices_are_told_with_their_tiles():
    tile = "BLOCK_M 64, BLOCK_N 32, BLOCK_K 128, num_warps 4, num_stages 3"
    one = AutotuneRecord("0/0", "mm", {"triton_mm_3": 0.01, "mm": 0.02}, {"triton_mm_3": tile})
    lines = texts(Story("f", "inductor", "2.13", "cuda:0", kernels=KernelStage(choices=(one,))))
    assert lines[-3:] == ["0/0 autotuned mm, 2 choices:", f"0.0100 ms triton_mm_3 ({tile})", "0.0200 ms mm"]
