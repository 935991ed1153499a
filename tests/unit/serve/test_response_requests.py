"""What /v1/responses is asked for."""

from __future__ import annotations

import pytest

from graft.base.errors import HttpRefused
from graft.serve.protocol import responses
from protocol_cases import NAMES, refused, respond


def test_a_response_is_asked_for_as_a_conversation():
    asked = respond(instructions="be brief", max_output_tokens=5, temperature=0, stream=True, store=True)
    assert asked.messages == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert asked.params.max_tokens == 5 and asked.stream and asked.params.greedy
    parts = [{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}]
    items = [{"role": "developer", "content": "x"}, {"type": "message", "role": "assistant", "content": parts}]
    assert [one["content"] for one in respond(input=items).messages] == ["x", "a\nb"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [1]}, "input[0]"),
        ({"input": [{"type": "function_call_output"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": 1}, "text"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"guided_regex": "a", "text": {"format": {"type": "json_object"}}}, "guided_regex"),
        ({"n": 2}, "n"),
        ({"instructions": 5}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_what_is_wrong_in_a_response_is_named(body, param):
    error = refused(lambda: respond(**body))
    assert (error.status, error.param) == (400, param)


def test_a_role_of_a_response_is_a_word():
    with pytest.raises(HttpRefused, match="only messages, with a role of"):
        responses.response({"input": [{"role": ["user"], "content": "x"}], "model": NAMES[0]}, NAMES)
