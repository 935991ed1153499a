"""Thoughts are split from answers, however a text is cut."""

from __future__ import annotations

import itertools
import json

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graft.base.errors import UsageError
from graft.serve.tools.reasoning import MISTRAL, THINK, ThinkParser, begins_inside, check_reasoning, marks_of
from serve_cases import PATIENCE, serving

PARTS = ["<think>", "</think>", " ", "\n", "a", "b c", "<", "<th", "ink>", "</thi", "nk>"]
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}


def split(text, cuts=(), state="before"):
    parser = ThinkParser(THINK, state)
    edges = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    found = [parser.feed(text[a:b]) for a, b in itertools.pairwise(edges)] + [parser.finish()]
    return "".join(one for one, _ in found), "".join(one for _, one in found)


@given(
    text=st.lists(st.sampled_from(PARTS), max_size=9).map("".join),
    cuts=st.lists(st.integers(0, 40), max_size=6),
    state=st.sampled_from(["before", "inside"]),
)
def test_however_a_text_is_cut_its_thoughts_are_the_same(text, cuts, state):
    whole = split(text, (), state)
    assert split(text, cuts, state) == whole
    if state == "before" and not text.lstrip().startswith("<think>"):
        assert whole == ("", text)  # nothing of the text is lost


@pytest.mark.parametrize(
    ("text", "state", "found"),
    [
        ("<think>\nwell\n</think>\n\nyes\n", "before", ("well", "yes\n")),
        ("well </think> yes", "inside", ("well", "yes")),
        ("<think>never ends", "before", ("never ends", "")),
        ("<think></think>yes", "before", ("", "yes")),
        ("yes <think>no</think>", "before", ("", "yes <think>no</think>")),
        ("<thinking>", "before", ("", "<thinking>")),
    ],
)
def test_thoughts_stand_at_the_beginning(text, state, found):
    assert split(text, (), state) == found


def test_marks_are_those_of_the_template():
    assert marks_of("auto", "… </think> …") == THINK and marks_of("auto", "[THINK][/THINK]") == MISTRAL
    assert marks_of("auto", "plain") is marks_of("auto", None) is marks_of("none", "</think>") is None
    assert marks_of("qwen3", None) == THINK
    assert begins_inside(THINK, "assistant\n<think>\n") and not begins_inside(THINK, "<think>\n\n</think>\n\n")
    with pytest.raises(UsageError, match="reasoning-parser"):
        check_reasoning("qwen4")


@pytest.fixture(scope="module")
def client():
    with serving("thinker") as server:
        found = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE)
        yield found
        found.close()


def say(text):
    return {"model": "thinker", "messages": [{"role": "user", "content": f"say:{text}"}]}


def test_chat_has_them_whole_and_in_streams(client):
    text = "<think>\nhm, so\n</think>\n\nthe answer"
    (choice,) = (whole := client.chat.completions.create(**say(text))).choices
    assert (choice.message.content, choice.message.reasoning_content) == ("the answer", "hm, so")
    assert choice.message.reasoning == "hm, so"
    thought = whole.usage.completion_tokens_details.reasoning_tokens
    assert 0 < thought < whole.usage.completion_tokens
    deltas = [one.choices[0].delta for one in client.chat.completions.create(**say(text), stream=True)]
    assert "".join(one.content or "" for one in deltas) == "the answer"
    pieces = [piece for one in deltas if (piece := getattr(one, "reasoning_content", None))]
    assert "".join(pieces) == "hm, so" and len(pieces) > 1
    options = {"chat_template_kwargs": {"enable_thinking": True}}  # the prompt ends with the mark
    (choice,) = client.chat.completions.create(**say("so</think>yes"), extra_body=options).choices
    assert (choice.message.content, choice.message.reasoning_content) == ("yes", "so")
    (choice,) = client.chat.completions.create(**say("plain")).choices
    assert choice.message.content == "plain" and not hasattr(choice.message, "reasoning_content")


def test_responses_have_thoughts_messages_and_calls_as_items(client):
    text = '<think>hm</think>See: <tool_call>{"name": "f", "arguments": {"a": [1]}}</tool_call>'
    text += '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    asked = {"model": "thinker", "input": f"say:{text}", "tools": [TOOL]}
    whole = client.responses.create(**asked)
    type(whole).model_validate(whole.model_dump(), strict=True)
    thought, message, *calls = whole.output
    assert thought.content[0].text == "hm" and message.content[0].text == "See:" and whole.output_text == "See:"
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("f", {"a": [1]}), ("f", {})]
    assert len({call.call_id for call in calls}) == 2 and whole.status == "completed"
    assert whole.usage.output_tokens_details.reasoning_tokens > 0 and whole.tools[0].name == "f"
    events = list(client.responses.create(**asked, stream=True))
    for event in events:
        type(event).model_validate(event.model_dump(), strict=True)
    assert [event.sequence_number for event in events] == list(range(len(events)))

    def bare(output):
        return [one.model_dump(exclude={"id", "call_id"}) for one in output]

    assert bare(events[-1].response.output) == bare(whole.output)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert bare(done) == bare(whole.output)
    pieces = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(one.delta for one in pieces if one.output_index == 2) == '{"a": [1]}'
    with client.responses.stream(**asked) as stream:  # the helper that puts the events together
        found = stream.get_final_response()
    assert found.output_text == "See:" and [one.type for one in found.output] == [one.type for one in whole.output]
    assert [one.arguments for one in found.output[2:]] == [one.arguments for one in calls]
    again = [
        {"role": "user", "content": "before"},
        *(one.model_dump(exclude_none=True) for one in whole.output),
        *({"type": "function_call_output", "call_id": call.call_id, "output": "7"} for call in calls),
        {"role": "user", "content": "say:done"},
    ]
    assert client.responses.create(**asked | {"input": again}).output_text == "done"


def test_what_a_response_cannot_have_is_refused(client):
    for fields, param in (
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [TOOL | {"strict": 1}]}, "strict"),
        ({"tool_choice": {"type": "function", "name": "g"}, "tools": [TOOL]}, "tool_choice"),
        ({"input": [{"type": "computer_call"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{"}]}, "input[0]"),
        ({"input": [{"type": "reasoning", "content": "x"}]}, "input[0].content"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(**{"model": "thinker", "input": "say:x", **fields})
        assert refused.value.param == param, fields
