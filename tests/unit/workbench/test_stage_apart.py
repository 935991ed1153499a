"""A story in a process of its own: whatever ends that process ends its story, with what was known up to there."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from torch._inductor.async_compile import AsyncCompile

import stage_hostile as hostile
import stage_programs as programs
from graft.base.errors import GraftError, RunMismatch, UsageError
from graft.stages.bucket_story import BucketStory
from graft.stages.buckets import tell_buckets
from graft.stages.story import Story
from graft.stages.story_code import KernelRecord, KernelStage
from graft.stages.tell import tell_story
from graft.workbench.stages.apart import CHECK, FileKeeper, tell_apart, what_is_left
from processes import run_python


def apart(function, calls, **settings) -> Story:
    def make(keeper):
        faulthandler.disable()  # pytest's; these programs are meant to crash
        return tell_story(function, calls, keeper=keeper, **settings)

    return tell_apart(make, "program.py:f")


def of(name: str) -> Story:
    return apart(getattr(hostile, name), getattr(hostile, f"{name}_inputs")(), backend="eager")


def test_a_story_that_comes_to_its_end_is_the_same_as_told_here():
    told = apart(programs.scaled, programs.scaled_inputs(), target="scaled", backend="eager")
    assert told.end is None and told.target == "scaled" and len(told.dynamo.graphs) == 2
    assert [(one.expected, one.actual) for one in told.dynamo.recompilations] == [("2", "3")]


@pytest.mark.parametrize(
    ("name", "how"),
    [("leaves", "the process left with code 0"), ("reads_nothing", "the process was ended by SIGSEGV")],
)
def test_a_program_that_ends_its_process_ends_its_story(name, how):
    story = of(name)
    assert str(story.end) == f"ended outside of the compiler, running call 1: {how}"
    assert len(story.dynamo.graphs) == 1 and story.dynamo.breaks  # what was traced before


@pytest.mark.exhaustive
@pytest.mark.parametrize("signal_name", ["SIGSEGV", "SIGABRT"])
def test_generated_code_that_ends_its_process_is_told_with_the_kernels_that_check_indices(monkeypatch, signal_name):
    """An exception that leaves a parallel loop aborts; what the code is made of is known before it runs."""

    def ending(*_args):
        os.kill(os.getpid(), getattr(signal, signal_name))

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_args, **_kwargs: ending)
    story = apart(programs.picked, programs.picked_inputs())
    assert story.end and (story.end.stage, story.end.doing) == (6, "running call 1, in the code of graph 0/0")
    assert f"ended by {signal_name}; indices are checked in cpp_fused_index_mul_0, where" in story.end.error
    assert story.kernels.kernels[0].source and story.scheduling.nodes
    story = apart(programs.longer, programs.longer_inputs())
    assert story.end and story.end.error == f"the process was ended by {signal_name}"


def test_indices_that_other_graphs_check_are_not_told(tmp_path: Path):
    """The number of one graph is in that of another, and one that is made ready does not run yet."""
    checks = KernelRecord("0/0", "cpp_fused_index_mul_0", "cpp", source=f'TORCH_CHECK(i < 8, "{CHECK}")')
    keeper = FileKeeper(tmp_path)
    keeper.story(Story("f", "inductor", "2.13.0", "cpu", kernels=KernelStage(kernels=(checks,))))
    for doing, told in (
        ("running call 1, in the code of graph 0/0", True),
        ("running call 1, in the code of graph 10/0", False),
        ("making graph 0/0 ready to run", False),
    ):
        keeper.at(6, doing)
        left = what_is_left(tmp_path, "f", -signal.SIGABRT, Story).end
        assert left and left.doing == doing and ("cpp_fused_index_mul_0" in left.error) is told


def test_a_pass_that_ends_its_process_is_told_as_that():
    def ending(_graph):
        os._exit(7)

    story = apart(programs.longer, programs.longer_inputs(), options={"post_grad_custom_post_pass": ending})
    assert story.end and story.end.stage == 3 and story.end.error == "the process left with code 7"


def test_a_size_whose_call_ends_the_process_is_told():
    def leaving(x):
        torch._dynamo.graph_break()
        return os._exit(5) if x.shape[0] == 3 else x

    calls = {2: (torch.ones(2),), 3: (torch.ones(3),)}
    story = tell_apart(lambda keeper: tell_buckets(leaving, calls, keeper=keeper), "f", BucketStory)
    assert story.end and str(story.end).endswith("calling size 3: the process left with code 5")
    assert [call.size for call in story.calls] == [2]


def raising(error):
    def make(_keeper):
        raise error

    return make


def test_errors_are_those_of_the_other_process(capfd):
    with pytest.raises(UsageError, match=r"^no such thing$"):
        tell_apart(raising(UsageError("no such thing")), "t")
    with pytest.raises(RunMismatch) as told:
        tell_apart(raising(RunMismatch("a", "b")), "t")
    assert str(told.value) == str(RunMismatch("a", "b")) and told.value.exit_code == 2
    with pytest.raises(GraftError, match="the story could not be told: KeyError: 'gone'"):
        tell_apart(raising(KeyError("gone")), "t")
    assert "Traceback" in capfd.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        tell_apart(raising(KeyboardInterrupt()), "t")
    with pytest.raises(UsageError, match=r"^t cannot be used: the process left with code 9 before anything was"):
        tell_apart(lambda _: os._exit(9), "t")


def test_an_interrupted_command_interrupts_the_program_and_waits_for_its_end(tmp_path: Path):
    """Only this process is sent the signal, as from `kill -INT`; the terminal sends it to both."""
    ended = tmp_path / "ended"

    def make(_keeper):
        try:
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(20)
        except KeyboardInterrupt:
            time.sleep(0.2)
            ended.write_text(str(os.getpid()))
            raise

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            tell_apart(make, "f")
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int(ended.read_text()), 0)


def test_a_process_that_has_compiled_before_can_tell_a_story():
    """Inductor's threads are not there in a forked process, and what waits for them would wait for ever."""

    def make(_keeper):
        assert AsyncCompile.pool().submit(int).result(timeout=60) == 0
        return Story("f", "eager", "2.13.0", "cpu")

    with torch._inductor.config.patch(compile_threads=2):
        assert AsyncCompile.pool().submit(int).result() == 0
        assert tell_apart(make, "f").target == "f"


def test_a_process_whose_output_nobody_reads_ends_all_the_same():
    """Else it would go on as this one does."""

    def make(_keeper):
        sys.stdout = open(os.devnull)  # noqa: SIM115  which cannot be flushed once it is closed
        sys.stdout.close()
        return Story("f", "eager", "2.13.0", "cpu")

    assert tell_apart(make, "f").target == "f"


def test_a_command_outlives_the_program(tmp_path: Path):
    words = ("-m", "graft", "stages", f"{hostile.__file__}:leaves", "--backend", "eager", "--json")
    done = run_python(*words, cwd=tmp_path)
    assert done.returncode == 1 and json.loads(done.stdout)["end"]["error"] == "the process left with code 0"
    assert not list(tmp_path.iterdir())
