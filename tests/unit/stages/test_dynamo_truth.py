"""What a story says of graph breaks and recompilations, against programs whose breaks and values are known."""

from __future__ import annotations

import inspect

import pytest
import torch

import stage_programs as programs
from graft.stages.breaks import read_break
from graft.stages.follow import follow
from graft.stages.recompiles import guard_values, read_recompilation
from graft.stages.story import Story, StoryEnd
from graft.stages.tell import tell_story
from graft.workbench.stages.questions import what_broke, why_missed, why_recompiled
from graft.workbench.stages.text import story_lines

ONES = torch.ones(2)


def line_of(function, text: str) -> str:
    lines, first = inspect.getsourcelines(function)
    return (
        f"{inspect.getsourcefile(function).rsplit('/', 1)[-1]}:{first + [text in one for one in lines].index(True)}"
    )


def story_of(function, *calls: tuple) -> Story:
    return tell_story(function, list(calls), backend="eager")


def branching(x):
    if x.sum() > 0:
        return x + 1
    return x


def looped(x):
    for step in range(2):
        x = x + step
        print("step")
    return x


def shouted(x):
    print("a helper")
    return x * 2


def calls_helper(x):
    y = x / x.norm()  # torch tells where the values on its stack came from, too
    return y + shouted(x)


def test_a_branch_on_data_is_told_as_that():
    (found,) = story_of(branching, (ONES,)).dynamo.breaks
    assert found.reason == "Data-dependent branching" and found.line == line_of(branching, "if x.sum()")


def test_a_break_in_a_loop_says_that_all_runs_uncompiled():
    story = story_of(looped, (ONES,))
    (found,) = story.dynamo.breaks
    assert found.line == line_of(looped, "print(") and not story.dynamo.graphs
    assert found.reason.startswith("Failed to trace builtin operator, then graph break in loop")
    assert found.reason.endswith("runs uncompiled") and all(
        "print" in hint or "PyTorch" in hint for hint in found.hints
    )
    assert "nothing was compiled" in story.dynamo.problem


def test_a_break_in_a_helper_has_the_line_that_calls_it():
    story = story_of(calls_helper, (ONES,))
    (found,) = story.dynamo.breaks
    assert (found.line, found.reason) == (line_of(shouted, "print("), "Failed to trace builtin operator")
    assert found.callers == (line_of(calls_helper, "shouted(x)"),)
    assert f"called from {found.callers[0]}" in what_broke(story).details[0]


def test_paths_with_blanks_are_lines_too():
    text = "Graph break in user code at /a b/my model.py:12\nGraph Break Reason: Odd thing\n  Explanation: of it\n"
    found = read_break("0/0", text)
    assert (found.line, found.reason, found.explanation) == ("my model.py:12", "Odd thing", "of it")


class Named:
    def __init__(self, name):
        self.name = name


def of_text(x, k):
    return x + len(k)


def of_object(x, one):
    return x + len(one.name)


def of_list(x, ks):
    return x * len(ks)


def of_dict(x, d):
    return x + sum(d.values())


def of_size(x, y):
    return x + y.sum() if x.shape[0] % 2 else x - 1


def of_kind(x, k=None, *, scale=2):
    return x * scale if k is None else x + 1


@pytest.mark.parametrize(
    ("function", "calls", "told"),
    [
        (of_text, [("a",), ("bb",), ("ccc",)], [("k == 'a'", "'a'", "'bb'"), ("k == 'bb'", "'bb'", "'ccc'"),
                                                ("k == 'a'", "'a'", "'ccc'")]),
        (of_object, [(Named("a"),), (Named("bb"),)], [("one.name == 'a'", "'a'", "'bb'")]),
        (of_list, [([1],), ([1, 2],)], [("len(ks) == 1", "1", "2")]),
        (of_kind, [(), ("a",), ([1],), ({},)], [("k is None", "None", "'a'"), ("k == 'a'", "'a'", "[1]"),
                                                ("k is None", "None", "[1]"), ("type of k", "list", "dict"),
                                                ("k == 'a'", "'a'", "{}"), ("k is None", "None", "{}")]),
    ],
)  # fmt: skip
def test_both_values_of_a_guard_are_those_of_its_call(function, calls, told):
    story = story_of(function, *[(ONES, *call) for call in calls])
    assert [(one.guard, one.expected, one.actual) for one in story.dynamo.recompilations] == told
    assert {one.line for one in story.dynamo.recompilations} == {line_of(function, "return")}


def test_the_length_of_a_dict_has_both_values():
    """torch tells what failed, not the guard."""
    (found,) = story_of(of_dict, (ONES, {"a": ONES}), (ONES, {"a": ONES, "b": ONES})).dynamo.recompilations
    assert (found.guard, found.expected, found.actual) == ("len(d) == 1", "1", "2")


def test_sizes_and_gradients_have_both_values():
    calls = [(torch.ones(size), ONES) for size in (4, 6, 7)]
    found = story_of(of_size, *calls).dynamo.recompilations
    assert ("(x.size()[0] % 2) == 0", "0", "1") in [(one.guard, one.expected, one.actual) for one in found]
    found = story_of(lambda x: x * 2, (ONES,), (torch.ones(2, requires_grad=True),)).dynamo.recompilations
    assert [(one.expected, one.actual) for one in found] == [("False", "True")]


def test_a_graph_is_counted_once_however_many_guards_failed():
    story = story_of(of_text, *[(ONES, k) for k in ("a", "bb", "ccc")])
    assert len(story.dynamo.recompilations) == 3 and why_recompiled(story).answer.startswith(
        "2 times; first: k == 'a'"
    )


def test_a_compilation_over_the_limit_is_none():
    """torch says why it would have compiled again, and does not."""
    story = story_of(programs.endless, *programs.endless_inputs())
    assert {one.graph for one in story.dynamo.recompilations} == {one.graph for one in story.dynamo.graphs[1:]}


def test_guards_without_a_frame_have_the_values_of_their_text():
    text = "0/0: tensor 'x' size mismatch at index 0. expected 2, actual 3"
    found = read_recompilation("0/1", text, {})
    assert (found.guard, found.expected, found.actual) == ("tensor 'x' size mismatch at index 0", "2", "3")
    assert guard_values("___check_type_id(L['k'], 12)", {}, {}) == ("what it was compiled with", "")
    assert guard_values("2 <= n", {"n": 1}, {"n": 1}) == (">= 2", "1")
    assert guard_values("a == b", {"a": 1, "b": 2}, {"a": 1, "b": 2}) == ("2", "1")
    assert guard_values("not odd(n)", {"n": 1}, {"n": 1}) == ("", "n = 1")
    assert guard_values("no expression (", {}, {}) == ("", "")


def eight(x):
    return x * 2 if x.shape[0] == 8 else x - 1


def test_what_dynamo_refuses_is_not_the_programs_own_error():
    sized = torch.ones(8)
    torch._dynamo.mark_dynamic(sized, 0)
    story = story_of(eight, (sized,))
    assert story.end is not None and (story.end.stage, story.end.doing) == (1, "making guards")
    assert "You marked L['x'].size()[0] as dynamic" in story.end.error and story.end.error.endswith(" …")


def test_stages_behind_the_end_say_that_they_were_not_reached():
    story = Story("of", "inductor", "2.13.0", "cpu", end=StoryEnd(4, "scheduling", "ValueError: no"))
    told = [line.text for line in story_lines(story)]
    assert told.count("  not reached: the run ended in stage 4") == 3 and told[-1].startswith("ended in stage 4")


def scaled(x, k):
    return torch.nn.functional.silu(x * k)


def test_a_value_whose_origin_torch_forgets_is_not_told_as_gone():
    """A number that becomes a tensor takes the lines of what it is computed with."""
    story = tell_story(scaled, [(ONES, 0.5), (ONES, 0.25)])
    gone = [trail.gone for trail in follow(story, "mul") if not trail.kernels]
    assert gone and all(reason.startswith("not known: ") for reason in gone)


def branches(x):
    return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


def test_control_flow_is_not_taken_apart_and_no_advice_is_for_passes():
    story = tell_story(branches, [(ONES,)])
    assert not any("get_attr" in one.into for one in story.functional.decompositions)
    answer = why_missed(story)
    assert answer.answer.startswith("it was bypassed") and not answer.advice
