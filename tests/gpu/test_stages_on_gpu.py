"""graft stages on a GPU: Triton's kernels with times, registers and spills, autotuning, CUDA graphs, streams, one
kernel alone, sizes, and the command itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

import graft
from graft.cli.app import app
from graft.stages.buckets import tell_buckets
from graft.stages.story import Story
from graft.stages.tell import tell_story
from graft.testing import assert_cudagraphed
from graft.workbench.repro.kernel import kernel_source, time_file
from graft.workbench.stages.compare import diff_stories
from graft.workbench.stages.questions import why_no_cudagraph
from graft.workbench.stages.text import story_lines

SOURCE = Path(graft.__file__).parents[1]
PROGRAM = """
import torch


def step(x, w):
    return torch.softmax(torch.nn.functional.silu(x) @ w, -1) * 2


def step_inputs():
    return [(torch.rand(384, 256, device="cuda"), torch.rand(256, 768, device="cuda"))]


def written(cache, x):
    cache.add_(x)
    return cache * 2


def written_inputs():
    return [(torch.zeros(48, device="cuda"), torch.ones(48, device="cuda"))]
"""


def step(x, w):
    return torch.softmax(F.silu(x) @ w, -1) * 2


def branch(x):
    return (x.cpu() * 2).to(x.device) + 1


def written(cache, x):
    cache.add_(x)
    return cache * 2


def attend(x, w):
    q = (x @ w).view(1, x.shape[0], 2, 32).transpose(1, 2)
    a = F.scaled_dot_product_attention(q, q, q)
    return F.silu(a.transpose(1, 2).reshape(x.shape[0], 64) @ w) + x


def made(*shape: int) -> torch.Tensor:
    return torch.rand(shape, device="cuda")


def texts(story: Story, stage: int) -> list[str]:
    return [line.text.strip() for line in story_lines(story, stage)]


@pytest.fixture(scope="module")
def story() -> Story:
    """Of one call, which alone would not record a CUDA graph."""
    return tell_story(step, [(made(512, 256), made(256, 1024))], mode="reduce-overhead", values=True)


def test_triton_kernels_have_times_registers_and_spills(story):
    assert story.end is None, story.end
    triton = [one for one in story.kernels.kernels if one.language == "triton"]
    assert len(triton) == 2 and all(0 < one.us < 1000 and not one.not_timed for one in triton)
    assert all(one.us_range[0] <= one.us <= one.us_range[1] for one in triton)
    assert all(one.registers and one.spills is not None and "num_warps" in one.tile for one in triton)
    told = texts(story, 5)
    assert any("registers, 0 spilled, tile XBLOCK" in line for line in told), told
    assert all(one.not_finite == 0 for one in story.runtime.values) and story.runtime.values
    assert all(one.within_noise for one in diff_stories(story, story).times)


def test_a_cuda_graph_is_recorded(story):
    assert all(one.asked and one.recorded for one in story.runtime.cudagraphs) and story.runtime.cudagraphs
    assert why_no_cudagraph(story).answer == "it was not: 1 recorded"
    assert "0/0 CUDA graph recorded" in texts(story, 6) and "launches on 1 current stream" in texts(story, 6)
    assert_cudagraphed(step, made(512, 256), made(256, 1024))


def test_a_graph_that_writes_an_input_is_skipped_when_it_runs():
    told = tell_story(written, [(made(32), made(32))], mode="reduce-overhead", whole=False)
    assert why_no_cudagraph(told).answer.startswith("1 of 1 skipped: mutated inputs"), told.runtime
    assert not told.runtime.cudagraphs[0].recorded
    with pytest.raises(AssertionError, match=r"1 of 1 skipped\n.*mutated inputs"):
        assert_cudagraphed(written, made(32), made(32))


def test_work_on_the_cpu_parts_a_graph_or_leaves_it_unrecorded():
    options = {"triton.cudagraphs": True, "graph_partition": False}
    whole = tell_story(branch, [(made(64),)], options=options, whole=False)
    answer = why_no_cudagraph(whole).answer
    assert answer.startswith("1 of 1 skipped: ") and "cpu" in answer, answer
    parted = tell_story(branch, [(made(64),)], options={**options, "graph_partition": True}, whole=False)
    assert parted.runtime.cuts and all(one.reason for one in parted.runtime.cuts), parted.runtime
    assert any("around" in line and "cpu ops" in line for line in texts(parted, 6)), texts(parted, 6)


def test_what_became_of_a_stream_of_the_program_is_told():
    """Kept, or not kept by this Inductor, or a break: in no case nothing."""
    side = torch.cuda.Stream()

    def beside(x):
        with torch.cuda.stream(side):
            y = x.sin()
        torch.cuda.current_stream().wait_stream(side)
        return y + x

    told = tell_story(beside, [(made(80),)], whole=False)
    stage = told.runtime
    assert stage.side_streams or stage.entered_streams or told.dynamo.breaks or told.end, told
    if stage.entered_streams:
        words = "of the program's own" if stage.side_streams else "the program enters and the code does not"
        assert any(words in line for line in texts(told, 6)), texts(told, 6)


def test_max_autotune_tells_choices_tiles_and_configurations():
    options = {
        "max_autotune": True,
        "max_autotune_gemm_backends": "TRITON",
        "test_configs.max_mm_configs": 3,
    }
    args = tuple(torch.rand(shape, device="cuda", dtype=torch.bfloat16) for shape in ((320, 512), (512, 1536)))
    told = tell_story(lambda x, w: torch.softmax(x @ w, -1) * 2, [args], options=options)
    assert told.end is None, told.end
    choice = next(one for one in told.kernels.choices if one.name == "mm")
    times = list(choice.ms.values())
    assert len(times) > 1 and times == sorted(times) and set(choice.tiles) == set(choice.ms)
    assert all("BLOCK_M" in one and "num_warps" in one for one in choice.tiles.values())
    template = next(one for one in told.kernels.kernels if "mm" in one.name and one.language == "triton")
    assert template.tile.startswith("BLOCK_M") and template.registers and template.us > 0, template
    configs = told.kernels.configs
    assert configs and all(len(one.ms) + one.failed > 1 and set(one.registers) == set(one.ms) for one in configs), (
        told.kernels
    )
    lines = texts(told, 5)
    assert any(line.startswith("0/0 autotuned mm, ") for line in lines), lines
    assert any("registers, " in line and " ms XBLOCK" in line for line in lines), lines
    assert not told.kernels.single and not told.kernels.autotuning


def test_one_triton_kernel_runs_alone(story, tmp_path):
    kernel = next(one for one in story.kernels.kernels if one.language == "triton")
    file = tmp_path / f"{kernel.name}.py"
    file.write_text(kernel_source(story, kernel, "graft repro"))
    found = time_file(file)
    assert 0 < found["least_us"] <= found["us"] <= found["most_us"] < 1000 and found["kernel"] == kernel.name


def test_sizes_are_compiled_captured_and_reused():
    story = tell_buckets(attend, {size: (made(size, 64), made(64, 64)) for size in (8, 64)})
    assert story.end is None, story.end
    assert len(story.pieces) == 2 and "scaled_dot_product_attention" in story.left
    assert all(one.captured for call in story.calls[:2] for one in call.compiled), story
    assert all(not call.compiled and call.reused == 2 for call in story.calls[2:])


def test_the_command_tells_the_story_in_a_process_of_its_own(tmp_path):
    """The forked process is the first to use the GPU; another one makes the call again with the artifacts."""
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ["stages", "program.py:step", "--mode", "reduce-overhead", "-o", "run"]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-m", "graft", *words], cwd=tmp_path, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stdout + done.stderr
    told = done.stdout
    assert "CUDA graph recorded" in told and "registers, " in told and "7 caches" in told, told
    assert "fx_graph hit" in told and told.rstrip().endswith("the same results"), told
    run = str(tmp_path / "run")
    asked = CliRunner().invoke(app, ["stages", "ask", "kernel", run, "program.py:6"])
    assert asked.exit_code == 0 and "triton_" in asked.output, asked.output
    found = json.loads(CliRunner().invoke(app, ["stages", run, "--json"]).stdout)
    assert found["device"].startswith("cuda") and found["runtime"]["cudagraphs"][0]["recorded"]


def test_the_question_is_answered_by_the_command(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ["stages", "ask", "cudagraph", f"{tmp_path / 'program.py'}:written", "--mode", "reduce-overhead"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and "1 of 1 skipped: mutated inputs" in done.output, done.output
