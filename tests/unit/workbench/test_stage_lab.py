"""graft stages: the questions people ask, one node followed, two runs compared, stories on disk, bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import stage_programs as programs
from graft.base.errors import DumpError, UsageError
from graft.cli.app import app
from graft.stages.follow import follow
from graft.stages.story import STAGES, DynamoStage, ScheduledNode, SchedulingStage, StageGraph, StageNode, Story
from graft.stages.story_code import CudagraphRecord, RuntimeStage
from graft.stages.tell import tell_story
from graft.workbench.stages import questions
from graft.workbench.stages.compare import diff_lines, diff_stories
from graft.workbench.stages.questions import QUESTIONS, find_question
from graft.workbench.stages.saved import FILE, open_story, save_story
from graft.workbench.stages.targets import find_target
from graft.workbench.stages.text import story_lines
from stage_stories import step, story

FILE_OF = Path(programs.__file__)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The story of `step` on disk; commands read it instead of compiling again."""
    path = tmp_path_factory.mktemp("stages") / "step"
    save_story(step(), path)
    return path


def run(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["stages", *map(str, words)])
    assert result.exit_code == code, result.output
    return result.output


def test_why_did_it_recompile():
    answer = questions.why_recompiled(story("scaled"))
    assert answer.answer == "once; first: k == 2, 3 where 2 was compiled"
    assert answer.details[0].startswith("0/1 because of 0/0: k == 2: expected 2, got 3 (stage_programs.py:")
    sizes = questions.why_recompiled(story("longer"))
    assert "size mismatch at index 0" in sizes.answer and "5 where 4 was compiled" in sizes.answer
    assert "mark_dynamic" in sizes.advice and "mark_dynamic" not in answer.advice
    assert questions.why_recompiled(story("printed")).answer.startswith("it did not")


def test_why_was_the_cuda_graph_skipped():
    assert "runs on cpu; CUDA graphs record the work of a GPU" in questions.why_no_cudagraph(step()).answer


def test_what_broke_the_graph():
    answer = questions.what_broke(story("printed"))
    assert answer.answer.startswith("stage_programs.py:") and "print" in answer.details[0] and answer.advice
    assert questions.what_broke(story("longer")).answer.startswith("nothing")


def test_which_kernel_is_a_line_in():
    line = next(node.line for node in step().dynamo.graphs[0].nodes if node.op == "operator.matmul")
    assert questions.which_kernel(step(), line).answer == "extern_kernels.mm"
    assert questions.which_kernel(step(), f":{line.partition(':')[2]}").answer == "extern_kernels.mm"
    assert questions.which_kernel(step(), "%exp").answer.startswith("cpp_fused")


def test_what_was_copied():
    answer = questions.what_copied(step())
    assert answer.answer == "2 copies, 384 bytes"
    assert any("%mm is copied into it" in line for line in answer.details)
    assert any("contiguous()" in line and "128 bytes" in line for line in answer.details)


def test_why_did_two_nodes_not_fuse():
    assert questions.why_not_fused(step(), "%clone", "%exp").answer == "no shared data"
    assert questions.why_not_fused(step(), "%clone", "%copy__1").answer
    assert questions.why_not_fused(step(), "%mean", "%sub").answer.startswith("they did: both are in op")
    assert questions.why_not_fused(step(), "%exp", "%mm").answer.startswith("%mm is a call (ExternKernelOut)")
    assert "never compared" in questions.why_not_fused(step(), "%clone", "%mean").answer


def test_why_was_the_cache_missed():
    assert questions.why_missed(step()).answer.endswith("the same call again is a hit")
    same = questions.why_missed(step(), since=step())
    assert same.answer.startswith("it would not be")
    sizes = story("longer", "inductor")
    differs = questions.why_missed(sizes, since=step())
    assert "example_inputs" in differs.answer or "gm" in differs.answer
    assert "gm" in questions.why_missed(sizes).details[0]  # the second graph has symbols


def test_a_pass_without_a_key_bypasses_the_cache():
    told = tell_story(
        programs.longer, programs.longer_inputs()[:1], options={"post_grad_custom_post_pass": lambda graph: None}
    )
    answer = questions.why_missed(told)
    assert answer.answer.startswith("it was bypassed: ") and "pass" in answer.answer and "uuid" in answer.advice


def test_a_line_is_followed_to_its_kernel():
    name = next(node.name for node in step().dynamo.graphs[0].nodes if node.op.endswith("silu"))
    (trail,) = follow(step(), name)
    assert trail.dynamo == (name,) and set(trail.post_grad) == {"neg", "exp", "add", "div"}
    assert trail.scheduled and trail.kernels and not trail.gone
    write = next(node.name for node in step().dynamo.graphs[0].nodes if node.op == "copy_")
    assert any(name.startswith("copy_") for name in follow(step(), write)[0].post_grad)


def test_what_a_pass_took_away_is_told():
    name = next(node.name for node in step().dynamo.graphs[0].nodes if node.op == "view")
    (trail,) = follow(step(), name)
    assert not trail.kernels and trail.gone == "taken out of the graph by remove_noop_ops"


def test_an_unknown_place_is_told_with_near_names():
    with pytest.raises(UsageError, match="no node of step is named 'clona'; did you mean 'clone'"):
        follow(step(), "clona")
    with pytest.raises(UsageError, match=r"no node of step was made by line nowhere\.py:1"):
        follow(step(), "nowhere.py:1")


def test_the_first_stage_that_differs():
    assert diff_stories(step(), step()).first is None
    found = diff_stories(story("longer"), story("longer", "inductor"))
    assert found.first == 2  # Dynamo does the same for both
    other = diff_stories(story("longer"), story("scaled"))
    assert other.first == 1 and any("silu" in fact for fact, _ in other.stages[0].added)
    texts = [line.text for line in diff_lines(other)]
    assert "first difference in stage 1, Dynamo" in texts and any(text.startswith("  + ") for text in texts)


def with_times(**times: tuple[float, ...]) -> Story:
    """`step` with kernels that took so long: the median, and the range of the readings."""
    kernels = step().kernels
    timed = tuple(
        replace(one, us=times[key][0], us_range=times[key][1:])
        for one in kernels.kernels
        for key in times
        if key in one.name
    )
    return replace(step(), kernels=replace(kernels, kernels=timed))


def test_times_of_kernels_are_compared_by_name():
    before = with_times(mm=(50.0, 49.0, 51.0), mean=(30.0, 29.0, 31.0))
    found = diff_stories(before, with_times(mm=(90.0, 88.0, 92.0), mean=(33.0, 30.5, 34.0)))
    assert (found.times[0].name, found.times[0].within_noise) == ("extern_kernels.mm", False)
    texts = [line.text for line in diff_lines(found)][-2:]
    assert texts[0] == "kernel times, each alone: 80.0 → 123.0 µs"
    assert texts[1] == "  extern_kernels.mm: 50.0 µs (49.0 to 51.0) → 90.0 µs (88.0 to 92.0)"
    assert [line.text for line in diff_lines(found, unfold=True)][-1].endswith(", within noise")
    assert not diff_stories(story("longer"), story("longer")).times


@pytest.mark.parametrize(
    ("before", "after", "noise"),
    [
        ((50.0, 49.0, 51.0), (53.0, 50.5, 55.0), True),  # the readings overlap
        ((50.0, 49.0, 51.0), (54.0, 53.5, 54.5), True),  # 2.5 µs apart: less than 2 µs and a twentieth
        ((50.0, 49.0, 51.0), (60.0, 59.0, 61.0), False),
        ((2.6, 2.5, 2.7), (4.5, 4.4, 4.6), True),  # seen of one program in two processes
        ((50.0, 49.0, 99.0), (80.0, 79.0, 81.0), True),  # a busy machine
        ((50.0,), (60.0,), False),
    ],
)
def test_a_change_that_is_less_than_noise_is_told_as_that(before, after, noise):
    found = diff_stories(with_times(mm=before), with_times(mm=after))
    (one,) = found.times
    assert one.within_noise is noise and found.to_dict()["times"][0]["within_noise"] is noise
    texts = [line.text for line in diff_lines(found) if "kernel" in line.text]
    assert texts[0].endswith(", each within noise") is noise and len(texts) == (1 if noise else 2)


def test_a_gpu_is_told_apart_by_less():
    before, after = (replace(with_times(mm=one), device="cuda:0") for one in ((2.6, 2.5, 2.7), (4.5, 4.4, 4.6)))
    assert not diff_stories(before, after).times[0].within_noise


def test_times_have_the_range_of_their_readings_in_the_text():
    told = [line.text for line in story_lines(with_times(mm=(50.0, 49.0, 51.0), mean=(48.0, 40.0, 60.0)), 5)]
    assert any("extern_kernels.mm: 1 node, 50.0 µs (49.0 to 51.0)" in line for line in told)
    total = next(line for line in told if "each alone" in line)
    assert total.startswith("  98.0 µs (89.0 to 111.0) in 2 launches") and total.endswith("(within noise)")
    sure = [line.text for line in story_lines(with_times(mm=(90.0, 89.0, 91.0), mean=(48.0, 40.0, 60.0)), 5)]
    assert any(line.endswith("each alone; most in extern_kernels.mm") for line in sure)


def test_text_has_every_stage_and_where_it_ended():
    texts = [line.text for line in story_lines(step())]
    assert [text[0] for text in texts if text[:1].isdigit()] == list("1234567")
    assert [line.text for line in story_lines(step(), 4)][2] == "4 scheduling"
    assert "ValueError: not today" in story_lines(story("raises"))[-1].text


def test_commands_answer_from_a_folder(folder):
    assert "extern_kernels.mm" in run("why", folder, "%mm")
    assert run("ask", "copies", folder).startswith("2 copies")
    assert "all seven stages are the same" in run("diff", folder, folder)
    assert "5 kernels" in run(folder) and "5 kernels" not in run(folder, "--stage", 4)
    assert json.loads(run(folder, "--json"))["target"] == "step"
    assert set(json.loads(run(folder, "--json", "--stage", 4))) & set(STAGES) == {"scheduling"}
    assert json.loads(run("ask", "cudagraph", folder, "--json"))["answer"]
    assert json.loads(run("why", folder, "%mm", "--json"))["items"][0]["kernels"] == ["extern_kernels.mm"]
    assert json.loads(run("diff", folder, folder, "--json"))["first"] is None
    names = {path.parent.name for path in folder.rglob("*.*")}
    assert {"graphs", "kernels"} <= names and open_story(folder) == step()


def test_runs_of_two_versions_of_torch_are_compared():
    """The keys of another torch have other parts throughout: that is one line."""
    mine, lookup = step(), step().caches.lookups[0]
    theirs = replace(lookup, components={f"part{index}": "abc" for index in range(300)})
    guards = replace(mine.dynamo, guards=mine.dynamo.guards[1:])
    other = replace(mine, torch="2.11.0", dynamo=guards, caches=replace(mine.caches, lookups=(theirs,)))
    found = diff_stories(other, mine)
    told = [line.text for line in diff_lines(found, unfold=True)]
    assert found.first == 1 and "  - key torch: 2.11.0" in told
    assert f"  + guard {mine.dynamo.guards[0].kind}  × {mine.dynamo.guards[0].count}" in told
    assert not any("part7" in line or "example_inputs" in line for line in told)


def test_a_function_in_a_file_is_told():
    output = run(f"{FILE_OF}:printed", "--backend", "eager")
    assert "break at stage_programs.py:" in output and "2 graph" not in output.splitlines()[0]
    assert "not today" in run(f"{FILE_OF}:raises", "--backend", "eager", code=1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((f"{FILE_OF}:nothing",), "has no function 'nothing'"),
        ((f"{FILE_OF}:without_inputs",), "nothing says what to call it with"),
        ((f"{FILE_OF}",), "name the function, too"),
        (("no_such_file.py:f",), "there is no Python file"),
        (("no-such-model",), "no-such-model"),
        ((f"{FILE_OF}:printed", "--dynamic", "maybe"), "write auto, true or false"),
        ((f"{FILE_OF}:printed", "--backend", "tvm"), "write inductor, graft or eager"),
        ((f"{FILE_OF}:printed", "--option", "freezing"), "write KEY=VALUE"),
        ((f"{FILE_OF}:printed", "--option", "frezing=true"), "frezing is not an option of Inductor"),
        (("ask", "recompile", "x"), "did you mean 'recompiles'"),
        (("ask", "fusion", "x", "%a"), "takes NODE|LINE NODE|LINE, and was given 1 words"),
        (("ask", "breaks", "x", "--since", "y"), "--since is for the question cache"),
    ],
)
def test_bad_requests_end_in_one_line(words, message):
    result = CliRunner().invoke(app, ["stages", *words])
    assert result.exit_code in (1, 2) and message in result.output and "Traceback" not in result.output


def test_every_question_can_be_asked():
    for name, question in QUESTIONS.items():
        assert find_question(name, question.words) is question and question.text.endswith("?")


def test_a_folder_that_is_no_story(tmp_path):
    with pytest.raises(DumpError, match=f"has no {FILE}"):
        open_story(tmp_path)
    (tmp_path / FILE).write_text("{}")
    with pytest.raises(DumpError, match="another version"):
        open_story(tmp_path)
    (tmp_path / FILE).write_text('{"format": 2, "strange": 1}')
    with pytest.raises(DumpError, match="no story: Story has no strange"):
        open_story(tmp_path)


def test_a_model_is_called_with_the_tokens_asked_for():
    target = find_target("tiny-llama", (3, 5))
    assert [call[0].shape[1] for call in target.calls] == [3, 5]


def plus_then_times(x):
    return (x + 1) * 2


def plus_then_thrice(x):
    return (x + 1) * 3


def times_then_plus(x):
    return (x * 2) + 1


def two_of_each(x, y):
    return (x + y) + (x - y), x * y


def two_of_each_the_other_way(x, y):
    return x * y, (x + y) + (x - y)


@pytest.mark.parametrize(
    ("before", "after", "fact"),
    [
        (plus_then_times, plus_then_thrice, "operator.mul(_, 3) : f32[4]"),
        (plus_then_times, times_then_plus, "operator.mul(input 0, 2)"),
        (two_of_each, two_of_each_the_other_way, "output([operator.mul, operator.add])"),
    ],
)
def test_a_program_that_computes_something_else_differs_in_stage_1(before, after, fact):
    """Of the same ops and types, too: another number, another order."""
    ones = torch.ones(4)
    args = (ones, ones) if before is two_of_each else (ones,)
    stories = [tell_story(one, [args], backend="eager") for one in (before, after)]
    found = diff_stories(*stories)
    assert found.first == 1 and fact in [text for text, _ in found.stages[0].added], found
    assert diff_stories(stories[0], stories[0]).first is None


def test_calls_that_read_the_same_ops_and_are_not_the_same_differ():
    """add reads add and mul in both; which add is another."""
    lines = "x placeholder ,a add %x 1,b add %x 2,m mul %a %b,c add %a %m,o output [%c]"
    graph = [StageNode(name, op, args=" ".join(args)) for name, op, *args in map(str.split, lines.split(","))]
    graphs = graph, [*graph[:4], replace(graph[4], args="%b %m"), graph[5]]
    stages = [DynamoStage(graphs=(StageGraph("0/0", "f", tuple(one)),)) for one in graphs]
    found = diff_stories(*(Story("f", "inductor", "2.13", "cpu", dynamo=one) for one in stages))
    assert found.first == 1 and "the same calls in another order" in found.stages[0].added[0][0]


def test_of_what_is_not_compiled_nothing_is_answered():
    told = tell_story(lambda k: k + 1, [(1,)], target="counts")
    assert told.dynamo.problem and not told.dynamo.graphs
    for ask in (questions.why_missed, questions.what_copied, questions.why_no_cudagraph):
        assert ask(told).answer == "nothing was compiled"
    assert questions.why_missed(told, since=step()).answer == "nothing was compiled"
    assert questions.why_recompiled(told).answer == questions.what_broke(told).answer == told.dynamo.problem


def test_a_line_is_no_emoji(folder, monkeypatch):
    told = replace(step(), notes=("model.py:100: a note",))
    monkeypatch.setattr("graft.workbench.stages.saved.open_story", lambda _: told)
    assert "model.py:100: a note" in run(folder)


@pytest.mark.parametrize("words", [("--backend", "graft"), ("--tokens", "3"), ("--dtype", "float16"),
                                   ("--device", "cpu"), ("--values",), ("--dynamic", "true")])  # fmt: skip
def test_a_story_that_is_over_takes_no_settings(folder, words):
    assert f"{words[0]} does nothing to" in run(folder, *words, code=2)


def test_dynamo_alone_takes_no_settings_of_inductor():
    for words in (("--mode", "reduce-overhead"), ("--option", "freezing=true")):
        assert f"{words[0]} does nothing to --backend eager" in run(
            f"{FILE_OF}:printed", "--backend", "eager", *words, code=2
        )


def test_what_is_equal_in_many_graphs_is_told_once():
    graphs = [f"0/{index}" for index in range(8)]
    node = StageNode("add", "operator.add")
    runs = RuntimeStage(
        cudagraphs=tuple(CudagraphRecord(one, asked=False, recorded=False, reason="no") for one in graphs),
        allocations=dict.fromkeys(graphs, 1),
    )
    many = Story(
        "f", "inductor", "2.13", "cpu", runtime=runs,
        dynamo=DynamoStage(graphs=tuple(StageGraph(one, "f", (node,)) for one in graphs)),
        scheduling=SchedulingStage(nodes=tuple(ScheduledNode(one, "op0", "Pointwise", (), "op0") for one in graphs)),
    )  # fmt: skip
    told = [line.text.strip() for line in story_lines(many)]
    assert "graph 0/0 f: 1 call: operator.add  × 8 graphs" in told
    assert "0/0 CUDA graph skipped: no  × 8 graphs" in told
    assert "0/0 allocates 1 buffer, 0 in reused memory  × 8 graphs" in told
    assert "4 more graphs: 4 nodes" in told and sum(line.startswith("graph 0/") for line in told) == 1 + 4
    other = replace(many.dynamo.graphs[7], nodes=(node, node))
    apart = replace(many, dynamo=DynamoStage(graphs=(*many.dynamo.graphs[:7], other)))
    told = [line.text.strip() for line in story_lines(apart, 1)]
    assert "graph 0/7 f: 2 calls: operator.add × 2" in told


def test_a_kernel_that_the_first_call_does_not_launch_says_why_it_has_no_time():
    told = story("longer", "inductor")
    first, second = told.kernels.kernels
    assert first.us and not first.not_timed and not second.us and "not launched by the first call" in second.not_timed
    assert any(line.text.strip().startswith("not timed, 1 kernel: not launched") for line in story_lines(told, 5))
