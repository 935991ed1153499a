"""What /v1/chat/completions is asked for: conversations, and the templates that they are rendered by."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from graft.serve.generation import from_chat
from graft.serve.protocol import requests
from graft.serve.text import ServedText
from protocol_cases import MESSAGES, TEXT, chat, refused, respond


def nested(levels):
    return {"items": nested(levels - 1)} if levels else {}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [*MESSAGES, {"role": "user", "content": [{"type": "image_url"}]}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
         "messages[0].tool_calls"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": nested(40)}}},
         "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"title": "x" * 70_000}}}},
         "response_format.json_schema.schema"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"continue_final_message": True}}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"continue_final_message": True, "messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
         "continue_final_message"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_chat_is_named(body, param):
    error = refused(lambda: chat(**body))
    assert (error.status, error.param) == (400, param)


def test_conversations_as_templates_take_them():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    found = requests.messages(
        [
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "name": "ann",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "7", "tool_call_id": "1"},
        ]
    )
    assert found[0] == {"role": "system", "content": "be brief"}
    assert found[1] == {"role": "user", "content": "a\nb", "name": "ann"}
    assert found[2]["content"] == "" and found[2]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert found[3]["tool_call_id"] == "1"


def test_a_template_that_refuses_is_the_clients_error():
    model = replace(TEXT.model, chat_template="{{ raise_exception('roles must alternate') }}", tokenizer=None)
    error = refused(lambda: ServedText(model).render(MESSAGES, True, {}))
    assert "roles must alternate" in str(error) and error.status == 400
    for template in ("{{ messages[5].content }}", "{{ 1 // 0 }}", "{{ messages.__class__.__mro__ }}{{ ''.x.y }}"):
        assert refused(lambda t=template: ServedText(replace(model, chat_template=t)).render(MESSAGES, True, {}))
    assert refused(lambda: ServedText(replace(model, chat_template=None)).render(MESSAGES, True, {}))
    assert TEXT.render(MESSAGES, True, {}) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_an_answer_may_go_on_with_the_last_message():
    said = [*MESSAGES, {"role": "assistant", "content": "The best is ("}]
    asked = chat(messages=said, continue_final_message=True)
    assert asked.continues and not asked.generation_prompt
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nThe best is ("
    assert TEXT.render(asked.messages, False, {}, continues=True) == text
    assert chat(messages=said).generation_prompt and not chat(messages=said, add_generation_prompt=False).continues
    hidden = replace(TEXT.model, chat_template="{{ messages[0].content }}", tokenizer=None)
    assert refused(lambda: ServedText(hidden).render(said, False, {}, continues=True)).param == "messages"


def test_how_hard_to_think_is_told_to_the_template():
    assert chat(messages=MESSAGES, reasoning_effort="low").template_options == {"reasoning_effort": "low"}
    own = {"reasoning_effort": "high", "x": 1}
    assert chat(messages=MESSAGES, reasoning_effort="low", chat_template_kwargs=own).template_options == own
    asked = respond(reasoning={"effort": "high", "summary": "auto"}, include=["reasoning.encrypted_content"])
    assert asked.template_options == {"reasoning_effort": "high"}
    assert not chat(messages=MESSAGES).template_options and not respond(reasoning={"effort": None}).template_options
    error = refused(lambda: chat(messages=MESSAGES, reasoning_effort=3))
    assert (error.status, error.param) == (400, "reasoning_effort")
    template = "{% if reasoning_effort %}Reasoning: {{ reasoning_effort }}{% endif %}"
    model = replace(TEXT.model, chat_template=template, tokenizer=None)
    assert ServedText(model).render(MESSAGES, True, asked.template_options) == "Reasoning: high"


def test_a_chat_has_only_so_many_logprobs_of_its_prompt():
    model = replace(TEXT.model, context=20_000, cache_tokens=20_000)
    asked = chat(messages=[{"role": "user", "content": "z" * 8000}], prompt_logprobs=20, max_tokens=1)
    assert refused(lambda: asyncio.run(from_chat(asked, TEXT, model, "x"))).param == "prompt_logprobs"
