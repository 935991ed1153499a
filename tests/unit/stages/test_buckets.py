"""graft stages --buckets: a function in pieces, which sizes were compiled, captured, reused."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

import stage_programs as programs
from graft.base.errors import UsageError
from graft.cli.app import app
from graft.stages import buckets
from graft.stages.bucket_story import BucketStory
from graft.stages.buckets import BucketRun, split_graph, tell_buckets
from graft.stages.cudagraphs import SeenCudagraphs
from graft.stages.needs import missing
from graft.stages.trace import tracing_rows
from graft.workbench.stages.bucket_text import bucket_lines
from graft.workbench.stages.targets import bucket_target

SIZES = (2, 3)


@pytest.fixture(scope="module")
def told() -> BucketStory:
    calls = {size: programs.chained_inputs(size)[0] for size in SIZES}
    return tell_buckets(programs.chained, calls, target="chained", split_at=("softmax",))


def test_names_that_it_needs_are_in_this_torch():
    assert not missing(buckets.NEEDS)


def test_every_size_is_compiled_once_and_then_reused(told):
    assert told.end is None and told.left == ("softmax",) and len(told.pieces) == 5
    first, again = told.calls[:2], told.calls[2:]
    assert [call.size for call in told.calls] == [*SIZES, *SIZES]
    assert [call.traced for call in first] == [True, False]  # sizes are open
    for call in first:
        assert sorted({one.piece for one in call.compiled}) == list(range(5)) and not call.reused
        assert [one.how for one in call.compiled].count("out of the cache") >= 1  # pieces between softmaxes are equal
        assert all(not one.captured and "runs on cpu" in one.reason for one in call.compiled)
    assert all(not call.compiled and call.reused == 5 and not call.traced for call in again)


def test_text_says_what_was_compiled_and_reused(told):
    texts = [line.text for line in bucket_lines(told)]
    assert texts[1].startswith("  split at softmax: 5 pieces of ")
    assert "out of the cache" in texts[3] and texts[3].startswith("  2: traced, ")
    assert any(text.startswith("  3: 5 pieces reused, nothing compiled; ") for text in texts)


def test_pieces_compute_what_the_function_does():
    x, w = programs.chained_inputs(3)[0]
    with tracing_rows() as trace, torch.no_grad():
        run = BucketRun(("softmax",), {}, trace, SeenCudagraphs(), size=3)
        made = torch.compile(programs.chained, backend=run.backend, dynamic=True)(x, w)
    torch._dynamo.reset()
    torch.testing.assert_close(made, programs.chained(x, w))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(made, programs.chained(x, 2 * w))


def test_a_graph_without_such_an_op_is_one_piece():
    gm = torch.fx.symbolic_trace(lambda x: torch.softmax(x + 1, -1))
    split, pieces = split_graph(gm, ("attention",))
    assert len(pieces) == 1 and len(list(split.named_children())) == 1
    split, pieces = split_graph(gm, ("softmax",))
    assert len(pieces) == 1 and len(list(split.named_children())) == 2  # the op itself stays


def test_a_program_that_raises_has_a_story_up_to_there():
    story = tell_buckets(lambda x: x @ torch.ones(3, 3), {3: (torch.ones(2, 3),), 4: (torch.ones(2, 4),)})
    assert story.end is not None and story.end.doing == "calling size 4" and len(story.calls) == 1
    assert bucket_lines(story)[-1].text.startswith("ended ")


def test_a_function_has_inputs_for_each_size():
    target = bucket_target(f"{programs.__file__}:chained", SIZES)
    assert [call[0].shape[0] for call in target.calls] == [2, 3]
    with pytest.raises(UsageError, match=r"write def step_inputs\(size\)"):
        bucket_target(f"{programs.__file__}:step", SIZES)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--buckets", "1,x"), "--buckets takes numbers"),
        (("--buckets", "0"), "sizes of at least 1"),
        (("--buckets", "1", "-o", "x"), "-o is not for --buckets"),
        (("--buckets", "1", "--backend", "graft"), "with Inductor, not with graft"),
        (("--buckets", "1", "--dynamic", "maybe"), "write auto, true or false"),
        (("--buckets", "1", "--tokens", "3"), "--tokens is not for --buckets"),
        (("--buckets", "1", "--dtype", "float16"), "--dtype does nothing to a function"),
    ],
)
def test_bad_requests_end_in_one_line(words, message):
    result = CliRunner().invoke(app, ["stages", f"{programs.__file__}:chained", *words])
    assert result.exit_code in (1, 2) and message in result.output and "Traceback" not in result.output


def test_json_has_all_of_it(monkeypatch, told):
    monkeypatch.setattr(buckets, "tell_buckets", lambda *_args, **_kwargs: told)
    words = ["stages", f"{programs.__file__}:chained", "--buckets", "2,3", "--json"]
    found = json.loads(CliRunner().invoke(app, words).output)
    assert [call["size"] for call in found["calls"]] == [*SIZES, *SIZES]
