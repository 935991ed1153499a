"""graft stages on a GPU: Triton's kernels with times, registers and spills, CUDA graphs, one kernel alone, sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from graft.stages.buckets import tell_buckets
from graft.stages.story import Story
from graft.stages.tell import tell_story
from graft.workbench.repro.kernel import kernel_source, time_file
from graft.workbench.stages.questions import why_no_cudagraph
from graft.workbench.stages.text import story_lines


def step(x, w):
    return torch.softmax(F.silu(x) @ w, -1) * 2


def branch(x):
    return (x.cpu() * 2).to(x.device) + 1


def attend(x, w):
    q = (x @ w).view(1, x.shape[0], 2, 32).transpose(1, 2)
    a = F.scaled_dot_product_attention(q, q, q)
    return F.silu(a.transpose(1, 2).reshape(x.shape[0], 64) @ w) + x


def made(*shape: int) -> torch.Tensor:
    return torch.rand(shape, device="cuda")


@pytest.fixture(scope="module")
def story() -> Story:
    calls = [(made(512, 256), made(256, 1024))] * 3
    return tell_story(step, calls, mode="reduce-overhead", values=True)


def test_triton_kernels_have_times_registers_and_spills(story):
    assert story.end is None, story.end
    triton = [one for one in story.kernels.kernels if one.language == "triton"]
    assert len(triton) == 2 and all(0 < one.us < 1000 and not one.not_timed for one in triton)
    assert all(one.registers and one.spills is not None and "num_warps" in one.tile for one in triton)
    assert any("registers, 0 spilled" in line.text for line in story_lines(story, 5))
    assert all(one.not_finite == 0 for one in story.runtime.values) and story.runtime.values


def test_a_cuda_graph_is_recorded_or_has_a_reason(story):
    assert all(one.asked and one.recorded for one in story.runtime.cudagraphs) and story.runtime.cudagraphs
    assert why_no_cudagraph(story).answer.startswith("it was not")
    skipped = tell_story(branch, [(made(64),)] * 3, mode="reduce-overhead")
    assert "skipped" in why_no_cudagraph(skipped).answer or skipped.runtime.cudagraphs[0].recorded  # by partitions


def test_one_triton_kernel_runs_alone(story, tmp_path):
    for kernel in story.kernels.kernels:
        file = tmp_path / f"{kernel.name}.py"
        file.write_text(kernel_source(story, kernel, "graft repro"))
        found = time_file(file)
        assert 0 < found["least_us"] < 1000 and found["kernel"] == kernel.name


def test_sizes_are_compiled_captured_and_reused():
    story = tell_buckets(attend, {size: (made(size, 64), made(64, 64)) for size in (8, 64)})
    assert story.end is None, story.end
    assert len(story.pieces) == 2 and "scaled_dot_product_attention" in story.left
    assert all(one.captured for call in story.calls[:2] for one in call.compiled)
    assert all(not call.compiled and call.reused == 2 for call in story.calls[2:])
