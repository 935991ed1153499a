"""graft stages around programs that print, exit, raise or cannot be copied: what is told, and the exit code."""

from __future__ import annotations

import inspect
import json

import pytest
import torch
from typer.testing import CliRunner

import stage_hostile as hostile
from graft.base.errors import StoryEnded, UsageError
from graft.cli.app import app
from graft.stages.follow import follow
from graft.stages.recompiles import value_text
from graft.stages.story import FreshProcess, Story
from graft.stages.tell import detached, device_of, tell_story
from graft.workbench.stages.compare import diff_lines, diff_stories
from graft.workbench.stages.fresh import FreshRun, same_bits, unsaved
from graft.workbench.stages.questions import QUESTIONS, with_end


def run(*words: str):
    return CliRunner().invoke(app, ["stages", *words])


def at(name: str) -> str:
    return f"{hostile.__file__}:{name}"


def told(name: str) -> Story:
    return tell_story(getattr(hostile, name), getattr(hostile, f"{name}_inputs"), target=name, backend="eager")


def line_of(function, text: str) -> str:
    lines, first = inspect.getsourcelines(function)
    return f"stage_hostile.py:{first + [text in one for one in lines].index(True)}"


def test_what_the_program_prints_is_not_in_the_json(capfd):
    done = run(at("prints"), "--backend", "eager", "--json")
    assert json.loads(done.stdout)["target"] == "stage_hostile.py:prints" and done.exit_code == 0
    beside = capfd.readouterr()
    assert "past Python's own output" in beside.err and "past" not in beside.out
    assert "while it is called" in done.stderr and "while inputs are made" in done.stderr


def test_a_program_that_exits_has_a_story_and_our_exit_code():
    done = run(at("exits"), "--backend", "eager", "--json")
    assert done.exit_code == 1 and json.loads(done.stdout)["end"]["error"] == "SystemExit: 0"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((at("exits_for_inputs"),), "cannot be used: SystemExit: 0"),
        ((at("keyword_only"),), "call 1 of keyword_only_inputs does not fit keyword_only: missing a required"),
        ((at("number"),), "number is of type int, which cannot be called"),
        ((at("prints"), "--mode", "fast"), "--mode fast: torch.compile has no such mode"),
        ((at("prints"), "--option", "freezing=[1"), "is no value of YAML"),
        (
            (at("prints"), "--option", "freezing=maybe"),
            "--option freezing=maybe: type of attr freezing, got str",
        ),
        ((at("prints"), "--tokens", "3"), "--tokens does nothing to a function"),
        ((at("prints"), "--dtype", "float16"), "--dtype does nothing to a function"),
    ],
)
def test_wrong_requests_are_one_line_and_2(words, message):
    done = run(*words, *(() if words[1:2] in (("--mode",), ("--option",)) else ("--backend", "eager")))
    assert done.exit_code == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_a_file_that_exits_while_it_is_imported_is_told(tmp_path):
    (tmp_path / "leaves_at_once.py").write_text("import sys\nsys.exit(0)\n")
    done = run(f"{tmp_path / 'leaves_at_once.py'}:f")
    assert done.exit_code == 2 and "cannot be used: SystemExit: 0" in done.stderr


def test_arguments_that_cannot_be_copied_are_given_as_they_are_and_told():
    story = told("takes_lock")
    assert story.end is None and story.dynamo.graphs and "type lock is shared by all calls" in story.notes[0]
    story = told("takes_result")  # no leaf of autograd, which is copied all the same
    assert story.end is None and story.dynamo.graphs and not story.notes


def test_a_backward_without_gradients_is_not_blamed_on_the_program_alone():
    assert told("needs_gradients").end.error.endswith("(a story's calls are made without gradients)")


def test_an_error_while_tracing_has_its_reason_and_line():
    end = told("misfits").end
    assert end.stage == 1 and "must have same reduction dim" in end.error and "FakeTensor" not in end.error
    assert end.error.endswith(f"({line_of(hostile.misfits, 'return y @')})")


def test_answers_of_a_run_that_ended_say_so():
    late, misfits = told("raises_late"), told("misfits")
    answer = with_end(QUESTIONS["recompiles"].ask(misfits), misfits)
    assert answer.answer.startswith("it ended in stage 1, tracing: ")  # and not: every graph was compiled once
    answer = with_end(QUESTIONS["recompiles"].ask(late), late)
    assert "k == 1, 2 where 1 was compiled; but it ended" in answer.answer and answer.details
    assert run("ask", "recompiles", at("misfits")).exit_code == 1
    with pytest.raises(StoryEnded, match="the run ended in stage 1"):
        follow(misfits, "%nothing")


def test_a_comparison_says_which_run_ended():
    diff = diff_stories(told("calls_helper"), told("misfits"))
    assert diff.ends[0].startswith("B ended in stage 1") and diff.ends[0] in [one.text for one in diff_lines(diff)]


def test_a_line_has_what_its_functions_make():
    story = told("calls_helper")
    first, second = (line_of(hostile.calls_helper, text) for text in ("y = helper", "return helper"))
    assert follow(story, first)[0].dynamo == ("mul", "y") and "sub" in follow(story, second)[0].dynamo
    assert set(follow(story, line_of(hostile.helper, "return"))[0].dynamo) == {"mul", "y", "mul_1", "add_1"}


def test_settings_do_nothing_to_a_story_that_is_over(tmp_path):
    assert run(at("calls_helper"), "--backend", "eager", "-o", str(tmp_path)).exit_code == 0
    done = run(str(tmp_path), "--mode", "reduce-overhead")
    assert done.exit_code == 2 and "--mode does nothing to" in done.stderr
    assert run(str(tmp_path)).exit_code == 0


def test_one_place_is_no_pair():
    with pytest.raises(UsageError, match="is one place; name two"):
        QUESTIONS["fusion"].ask(told("calls_helper"), "%mul", "mul")


def test_what_cannot_be_saved_for_another_process_is_told(tmp_path):
    found = FreshRun("t", [8])(b"", lambda x: x, (lambda: 1,), None)
    assert isinstance(found, FreshProcess) and found.problem.startswith("the arguments cannot be saved for it: ")
    assert unsaved((1,), tmp_path / "given") == ""
    odd = torch.tensor([float("nan"), 1.0])
    assert same_bits(odd, odd.clone()) and not same_bits(odd, odd + 1) and not same_bits(odd, odd.double())


def test_what_a_call_returns_without_running_it_is_told():
    def pieces(x):
        yield x + 1

    (note,) = tell_story(pieces, [(torch.ones(2),)], backend="eager").notes
    assert note.startswith("the function returns a generator, whose body nothing runs")


def test_results_that_have_no_numbers_are_compared_by_their_kind():
    meta = torch.ones(2, 3, device="meta")
    assert detached([meta, 3])[0] is not None and same_bits(meta, meta.clone())
    assert not same_bits(meta, meta.t()) and not same_bits(meta, torch.ones(2, 3))


def test_tensors_in_lists_are_told_by_their_kind_and_device():
    args = ([torch.ones(2), 3], {"a": torch.ones(4)}, (torch.ones(1),) * 9)
    assert [value_text(one) for one in args[:2]] == ["[float32[2], 3]", "{'a': float32[4]}"]
    assert value_text(args[2]).endswith(", …)") and value_text([1, 2]) == "[1, 2]"
    assert device_of(lambda *_: None, [([torch.ones(2, device="meta")],)]) == "meta"
