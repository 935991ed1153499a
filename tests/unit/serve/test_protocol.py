"""Bodies to requests, tokens to answers: functions of JSON."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from graft.base.errors import HttpRefused, UsageError
from graft.engine.params import SamplingParams
from graft.engine.text.detokenize import TextStream
from graft.serve.generation import from_chat, from_completion
from graft.serve.protocol import answers, requests, responses, structure, values
from graft.serve.protocol.choices import Choice
from graft.serve.protocol.completions import CompletionFormat
from graft.serve.protocol.sampling import REFUSED, UNBOUNDED, fitted
from graft.serve.text import ServedText
from graft.serve.wire import AnswerRow, ServedModel, TokenLogprobs
from serve_cases import TEMPLATE, tokenizer_json

NAMES = ("mine", "other")
TEXT = ServedText(ServedModel("mine", 64, 300, 1000, 4, tokenizer_json(), TEMPLATE, {"eos_token": "<|im_end|>"}, ()))
MESSAGES = [{"role": "user", "content": "hi"}]


def completion(**body):
    return requests.completion({"prompt": "hi", **body}, NAMES, 300)


def chat(**body):
    return requests.chat({"messages": MESSAGES, **body}, NAMES)


def nested(levels):
    return {"items": nested(levels - 1)} if levels else {}


def refused(call):
    with pytest.raises(HttpRefused) as found:
        call()
    return found.value


def test_defaults_are_openais():
    asked = completion()
    assert asked.params == SamplingParams(temperature=1.0, max_tokens=16) and asked.model == "mine"
    assert not asked.stream and not asked.echo and asked.prompts == ["hi"]
    asked = chat(model="other")
    assert asked.params.max_tokens == UNBOUNDED and asked.model == "other" and asked.generation_prompt
    assert fitted(asked.params, 10, 64, 1000).max_tokens == 54
    assert fitted(asked.params, 10, 64, 40).max_tokens == 31  # the cache is smaller than the context


def test_null_is_the_same_as_left_out():
    fields = (*SamplingParams.__dataclass_fields__, *REFUSED, "stream", "stream_options", "echo", "model", "best_of")
    assert completion(**dict.fromkeys(fields)) == completion()
    assert chat(**dict.fromkeys(fields), top_logprobs=None) == chat()


def test_fields_of_vllm_and_unknown_ones():
    asked = completion(
        top_k=5, min_p=0.1, repetition_penalty=1.2, ignore_eos=True, min_tokens=2, stop="a", foo={"a": 1}
    )
    params = asked.params
    assert (params.top_k, params.min_p, params.repetition_penalty, params.ignore_eos) == (5, 0.1, 1.2, True)
    assert params.stop == ("a",) and params.min_tokens == 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 2**40}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"seed": 2**70}, "seed"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "include_usage"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [300]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [["a"]]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"tools": [{}]}, "tools"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"max_tokens": 0, "echo": False}, "max_tokens"),
        ({"max_tokens": False, "echo": True}, "max_tokens"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"-5": 1}}, "logit_bias"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"5": None}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
    ],
)
def test_what_is_wrong_is_named(body, param):
    error = refused(lambda: completion(**body))
    assert (error.status, error.param) == (400, param) and param in str(error)


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


def respond(**body):
    return responses.response({"input": "hi", **body}, NAMES)


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


class LargeObject(dict):
    """Of many members, none of which may be looked at."""

    def __len__(self):
        return 300_000

    def __iter__(self):
        raise AssertionError("it was read before its size was")

    keys = values = items = __iter__


class LargeList(list):
    __len__, __iter__ = LargeObject.__len__, LargeObject.__iter__


def test_what_is_too_large_is_refused_by_its_size_alone():
    assert refused(lambda: completion(logit_bias=LargeObject())).param == "logit_bias"
    with pytest.raises(UsageError, match="at most 1024 tokens, but is of 300000"):
        SamplingParams(logit_bias=LargeObject())
    for inner in (LargeObject(), LargeList()):
        schema = {"properties": {"a": {"enum": inner}}}
        assert "65536 characters" in str(refused(lambda s=schema: structure.checked(s, "x")))
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        asked = refused(lambda t=tools: chat(tools=t, tool_choice="required"))
        assert asked.param == "tools" and "characters" in str(asked)
    many = {f"a{index}": [1] * 40 for index in range(40_000)}
    assert "characters" in str(refused(lambda: structure.checked(many, "x")))


@given(st.recursive(st.text(max_size=3) | st.integers(), lambda one: st.lists(one) | st.dictionaries(st.text(), one)))
def test_no_schema_is_refused_for_more_characters_than_it_has(value):
    structure.bound([value, "a" * (structure.MOST_CHARACTERS - len(json.dumps(value)) - 10)], "x")


def test_other_models_are_not_found():
    error = refused(lambda: completion(model="none"))
    assert (error.status, error.code) == (404, "model_not_found") and "mine, other" in str(error)


def test_a_request_that_does_not_fit():
    params = SamplingParams(max_tokens=10)
    for prompt, context, cache in ((60, 64, 1000), (64, 64, 1000), (20, 64, 28)):
        error = refused(lambda p=prompt, c=context, k=cache: fitted(params, p, c, k))
        assert error.code == "context_length_exceeded"
    assert fitted(params, 20, 64, 29) is params
    assert refused(lambda: fitted(params, 0, 64, 64)).param == "prompt"
    assert refused(lambda: fitted(replace(params, max_tokens=UNBOUNDED, min_tokens=60), 10, 64, 64)).param


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


def test_tokens_that_end_an_answer_are_not_all():
    asked = completion(prompt=[5], min_tokens=1, stop_token_ids=list(range(300)))
    assert refused(lambda: asyncio.run(from_completion(asked, TEXT, TEXT.model, "x"))).param == "min_tokens"
    some = completion(prompt=[5], min_tokens=1, stop_token_ids=list(range(1, 300)))
    assert asyncio.run(from_completion(some, TEXT, TEXT.model, "x")).prompts == [[5]]


def rows_of(tokens, cuts, finish, stop):
    """The tokens in pieces, the last of which has the end."""
    edges = [0, *sorted(cuts), len(tokens)]
    parts = [tokens[a:b] for a, b in itertools.pairwise(edges)]
    last = len(parts) - 1
    ends = [(finish, stop) if index == last else (None, None) for index in range(len(parts))]
    likely = [[TokenLogprobs(-1.0, [(7, -0.5)]) for _ in part] for part in parts]
    return [AnswerRow(1, 0, part, p, *end, 0, None) for part, p, end in zip(parts, likely, ends, strict=True)]


@given(
    tokens=st.lists(st.integers(0, 299), min_size=1, max_size=12),
    data=st.data(),
    finish=st.sampled_from([("length", None), ("stop", 2)]),
)
def test_however_an_answer_is_cut_its_text_and_logprobs_are_the_same(tokens, data, finish):
    params = SamplingParams(logprobs=1, max_tokens=20)
    cuts = data.draw(st.lists(st.integers(0, len(tokens) - 1), max_size=4))
    choice = Choice(0, params, TextStream(TEXT, [5], params))
    parts = [
        (piece, answers.text_choice(choice, piece, TEXT))
        for piece in map(choice.take, rows_of(tokens, cuts, *finish))
    ]
    one = Choice(0, params, TextStream(TEXT, [5], params))
    one.take(rows_of(tokens, [], *finish)[0])
    whole = answers.text_choice(one, one.whole(), TEXT)
    assert "".join(part["text"] for _, part in parts) == whole["text"] == choice.whole().text
    shown = tokens[:-1] if finish[0] == "stop" else tokens  # the token that ended it is no part of the text
    assert whole["text"] == Tokenizer.from_str(tokenizer_json()).decode([5, *shown])[len(TEXT.decode([5])) :]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for _, part in parts for value in part["logprobs"][name]] == whole["logprobs"][name]
    assert choice.tokens == len(tokens) and choice.ended


def test_minus_infinity_is_a_number():
    row = AnswerRow(
        1, 0, [9], [TokenLogprobs(float("-inf"), [(9, float("-inf")), (9, -1.0)])], "length", None, 0, None
    )
    choice = Choice(0, SamplingParams(logprobs=2), None)
    shown = answers.text_choice(choice, choice.take(row), TEXT)["logprobs"]
    assert shown["token_logprobs"] == [-9999.0] and json.dumps(shown, allow_nan=False)


def test_a_prompts_logprobs_are_built_once_and_each_token_is_decoded_once():
    asked = completion(prompt=[5, 6, 7], n=64, prompt_logprobs=2)
    choices = []
    for index in range(64):
        choices.append(Choice(index, asked.params, None))
        choices[-1].prompt_logprobs = [TokenLogprobs(-1.0, [(8, -0.5), (9, -0.7)], 3) for _ in range(2)]
        choices[-1].take(AnswerRow(1, index, [5], None, "length", None, 0, None))
    text, decoded = ServedText(TEXT.model), []

    class Counted:
        def decode(self, ids, **_):
            decoded.extend(ids)
            return str(ids)

    text.tokenizer = Counted()
    made = CompletionFormat(asked, answers.Envelope("x", 0, "mine", False), asked.prompts, text).whole(choices)
    assert sorted(decoded) == [6, 7, 8, 9]
    first, *rest = [one["prompt_logprobs"] for one in made["choices"]]
    assert len(first) == 3 and first[0] is None and all(one is first for one in rest)


@pytest.mark.parametrize(
    ("tokens", "fields", "param"),
    [
        (8000, {"prompt_logprobs": 5}, None),
        (1000, {"prompt_logprobs": 20, "n": 128}, "prompt_logprobs"),
        (8000, {"logprobs": 20, "echo": True}, "logprobs"),
        (8000, {"logprobs": 20}, None),
    ],
)
def test_an_answer_has_only_so_many_logprobs_of_prompts(tokens, fields, param):
    model = replace(TEXT.model, context=20_000, cache_tokens=20_000)
    asked = completion(prompt=[5] * tokens, max_tokens=1, **fields)
    made = from_completion(asked, TEXT, model, "x")
    if param is None:
        assert asyncio.run(made).prompts == [[5] * tokens]
    else:
        assert refused(lambda: asyncio.run(made)).param == param


def test_a_chat_has_only_so_many_logprobs_of_its_prompt():
    model = replace(TEXT.model, context=20_000, cache_tokens=20_000)
    asked = chat(messages=[{"role": "user", "content": "z" * 8000}], prompt_logprobs=20, max_tokens=1)
    assert refused(lambda: asyncio.run(from_chat(asked, TEXT, model, "x"))).param == "prompt_logprobs"


def test_errors_have_openais_shape():
    assert answers.error_body("no", 400, "n", "c") == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": "c"}
    }
    assert answers.error_body("no", 429)["error"]["type"] == "rate_limit_error"


@given(st.text())
def test_events_are_one_line_of_json(text):
    line = answers.event({"text": text})
    assert line.startswith(b"data: ") and line.endswith(b"\n\n") and line.count(b"\n") == 2
    assert json.loads(line[6:]) == {"text": text}


@given(st.binary(max_size=30))
def test_any_bytes_are_a_body_or_refused(raw):
    try:
        assert isinstance(values.parse_json(raw), dict)
    except HttpRefused as error:
        assert error.status == 400


def test_a_role_of_a_response_is_a_word():
    with pytest.raises(HttpRefused, match="only messages, with a role of"):
        responses.response({"input": [{"role": ["user"], "content": "x"}], "model": NAMES[0]}, NAMES)
