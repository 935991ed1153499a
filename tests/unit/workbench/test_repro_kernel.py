"""graft repro --kernel: one generated kernel as a file that runs by itself and says how long it takes."""

from __future__ import annotations

import ast
import json
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from graft.base.errors import ReproRefused, UsageError
from graft.cli.app import app
from graft.stages.story_code import KernelRecord
from graft.workbench.repro.kernel import argument, find_kernel, kernel_source, time_file
from graft.workbench.stages.saved import save_story
from marks import left_out
from processes import run_python
from stage_stories import step, story

TRITON = """
import triton
from torch._inductor.async_compile import AsyncCompile
async_compile = AsyncCompile()
triton_poi_0 = async_compile.triton('triton_poi_0', '''def triton_poi_0(in_ptr0): pass''', device_str='cuda')
triton_poi_1 = async_compile.triton('triton_poi_1', '''def triton_poi_1(in_ptr0): pass''', device_str='cuda')
async_compile.wait(globals())
class Runner: pass
after = 1
"""


def silu() -> KernelRecord:
    return next(one for one in step().kernels.kernels if "silu" in one.name)


@pytest.mark.parametrize("forked", [True, left_out(False)])  # a name that the file does not import is missing in both
def test_the_file_runs_the_kernel_and_times_it(tmp_path, monkeypatch, forked):
    if forked:  # from a process that has torch, where its import takes most of the time
        processes = SimpleNamespace(
            run=lambda command, **_: run_python(*command[1:]), TimeoutExpired=subprocess.TimeoutExpired
        )
        monkeypatch.setattr("graft.workbench.repro.kernel.subprocess", processes)
    save_story(step(), tmp_path / "story")
    file = tmp_path / "one.py"
    words = ["repro", str(tmp_path / "story"), "--kernel", silu().name, "-o", str(file), "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert (
        found["kernel"] == silu().name
        and 0 < found["least_us"] <= found["us"] <= found["most_us"]
        and found["calls"] == 300
    )
    assert "import graft" not in file.read_text()


def test_a_file_holds_one_kernel_and_nothing_that_calls_others():
    source = kernel_source(step(), silu(), "graft repro")
    others = [one.name for one in step().kernels.kernels if one.name != silu().name]
    assert silu().name in source and not any(f"{name} =" in source for name in others)
    assert "class Runner" not in source and "tensor((4, 8,), (8, 1), torch.float32" in source
    ast.parse(kernel_source(step(), find_kernel(step(), "extern_kernels.mm"), "graft repro"))


def test_a_triton_kernel_is_launched_on_the_current_stream():
    kernel = KernelRecord(
        "0/0", "triton_poi_1", "triton", source="…", arguments=("float32[4] (1,) cuda:0", "64", "flag=True")
    )
    told = replace(step(), kernels=replace(step().kernels, kernels=(kernel,), code={"0/0": TRITON}))
    source = kernel_source(told, kernel, "graft repro")
    ast.parse(source)
    assert "triton_poi_1.run(*ARGUMENTS, **NAMED, stream=" in source and "triton_poi_0" not in source
    assert 'tensor((4,), (1,), torch.float32, "cuda:0")' in source and "{'flag': True}" in source


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("int64[] () cpu", 'tensor((), (), torch.int64, "cpu")'),
        ("2.5", "2.5"),
        ("[1, 2]", "[1, 2]"),
        ("torch.device('cpu')", "torch.device('cpu')"),
    ],
)
def test_arguments_are_made_up(text, made):
    assert argument(text, silu()) == made


def test_what_cannot_be_made_up_is_refused():
    with pytest.raises(ReproRefused, match="takes a Generator, which cannot be made up"):
        argument("Generator", silu())
    with pytest.raises(ReproRefused, match="has no known arguments: too large"):
        kernel_source(step(), replace(silu(), arguments=(), not_timed="too large"), "")


def test_kernels_are_found_by_name_and_graph():
    assert find_kernel(step(), f"0/0:{silu().name}") == silu()
    with pytest.raises(UsageError, match="no kernel of step is named 'cpp_fused_sulu'"):
        find_kernel(step(), "cpp_fused_sulu")
    twice = replace(step().kernels, kernels=(silu(), replace(silu(), graph="0/1")))
    with pytest.raises(UsageError, match="is in 2 graphs; write 0/0:"):
        find_kernel(replace(step(), kernels=twice), silu().name)


def test_a_file_that_fails_says_so(tmp_path):
    file = tmp_path / "bad.py"
    file.write_text("raise ValueError('not here')")
    with pytest.raises(ReproRefused, match="ended with 1: ValueError: not here"):
        time_file(file)


def test_kernels_are_listed_and_bad_requests_end_in_one_line(tmp_path):
    save_story(step(), tmp_path)
    listed = CliRunner().invoke(app, ["repro", str(tmp_path)]).output
    assert all(one.name in listed for one in step().kernels.kernels) and " µs" in listed
    names = json.loads(CliRunner().invoke(app, ["repro", str(tmp_path), "--json"]).output)["items"]
    assert {one["name"] for one in names} == {one.name for one in step().kernels.kernels}
    both = CliRunner().invoke(app, ["repro", str(tmp_path), "--kernel", "x", "--match", "y"])
    assert both.exit_code == 2 and "--kernel for one of graft stages" in both.output
    save_story(story("longer"), tmp_path / "eager")
    none = CliRunner().invoke(app, ["repro", str(tmp_path / "eager"), "--kernel", "x"])
    assert none.exit_code == 2 and "no kernel of longer" in none.output
    nothing = CliRunner().invoke(app, ["repro", str(tmp_path / "nowhere"), "--kernel", "x"])
    assert nothing.exit_code == 1 and "has no story.json" in nothing.output
