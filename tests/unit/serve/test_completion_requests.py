"""What /v1/completions is asked for: bodies to requests, and what all endpoints have in common."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graft.base.errors import HttpRefused, UsageError
from graft.engine.params import SamplingParams
from graft.serve.generation import from_completion
from graft.serve.protocol import structure, values
from graft.serve.protocol.sampling import REFUSED, UNBOUNDED, fitted
from protocol_cases import TEXT, chat, completion, refused


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


def test_tokens_that_end_an_answer_are_not_all():
    asked = completion(prompt=[5], min_tokens=1, stop_token_ids=list(range(300)))
    assert refused(lambda: asyncio.run(from_completion(asked, TEXT, TEXT.model, "x"))).param == "min_tokens"
    some = completion(prompt=[5], min_tokens=1, stop_token_ids=list(range(1, 300)))
    assert asyncio.run(from_completion(some, TEXT, TEXT.model, "x")).prompts == [[5]]


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


@given(st.binary(max_size=30))
def test_any_bytes_are_a_body_or_refused(raw):
    try:
        assert isinstance(values.parse_json(raw), dict)
    except HttpRefused as error:
        assert error.status == 400
