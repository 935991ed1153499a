"""Sampling parameters: what is allowed, and every wrong value told with its name and its range."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graft.base.errors import UsageError
from graft.engine.params import MOST_LOGPROBS, MOST_STOPS, RULES, SamplingParams

NUMBERS = [
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
]
WHOLE = ["n", "top_k", "seed", "logprobs", "prompt_logprobs", "max_tokens", "min_tokens"]
FLAGS = ["include_stop_str_in_output", "ignore_eos", "skip_special_tokens"]
WRONG = [
    ("n", 0, "n must be at least 1, but is 0"),
    ("temperature", -0.1, "temperature must be 0 or more and finite"),
    ("top_k", -2, "top_k must be at least 1, or 0 or -1 for off, but is -2"),
    ("top_p", 0.0, "top_p must be above 0 and at most 1"),
    ("top_p", 1.01, "but is 1.01"),
    ("top_p", -0.5, "top_p must be above 0"),
    ("min_p", -0.01, "min_p must be from 0 to 1"),
    ("min_p", 1.5, "min_p must be from 0 to 1"),
    ("repetition_penalty", 0.0, "repetition_penalty must be between 1e-6"),
    ("repetition_penalty", -1.0, "repetition_penalty must be between 1e-6"),
    ("presence_penalty", 2.1, "presence_penalty must be from -2 to 2"),
    ("presence_penalty", -2.1, "presence_penalty must be from -2 to 2"),
    ("frequency_penalty", 2.1, "frequency_penalty must be from -2 to 2"),
    ("frequency_penalty", -2.1, "frequency_penalty must be from -2 to 2"),
    ("max_tokens", 0, "max_tokens must be at least 1, but is 0"),
    ("min_tokens", -1, "min_tokens must be 0 or more, but is -1"),
    ("seed", 2**64, "seed must be a whole number that fits into 64 bits"),
    ("seed", -(2**63) - 1, "fits into 64 bits"),
    ("logprobs", -1, "logprobs must be from 0 to 20, or None for off, but is -1"),
    ("logprobs", MOST_LOGPROBS + 1, "but is 21"),
    ("prompt_logprobs", 21, "prompt_logprobs must be from 0 to 20, or None for off, but is 21"),
    ("logit_bias", {1: 101}, "logit_bias must be from -100 to 100, but is 101"),
    ("logit_bias", dict.fromkeys(range(1025), 1), "at most 1024 tokens, but is of 1025"),
    ("allowed_token_ids", [], "allowed_token_ids must have a token id at least"),
    ("allowed_token_ids", 5, "allowed_token_ids must be a list of token ids, but is 5"),
    ("allowed_token_ids", [1, -1], "whole numbers of 0 or more, but is -1"),
    ("allowed_token_ids", [1, True], "but is True"),
    ("allowed_token_ids", ["2"], r"but is '2' \(str\)"),
    ("bad_words", "word", "bad_words must be a list of strings, but is 'word'"),
    ("bad_words", ["a", ""], "bad_words must be strings of at least one character"),
    ("bad_words", [3], "but is 3"),
    ("bad_words", ["x"] * 1025, "bad_words must be at most 1024 strings, but is 1025"),
    ("bad_words", ["x" * 65_537], "bad_words must have at most 65536 characters together"),
    ("grammar", "", "grammar must be a text, as json_grammar"),
    ("grammar", {"type": "object"}, "grammar must be a text, as json_grammar"),
    ("stop", "", "stop must be strings of at least one character, but is ''"),
    ("stop", ["a", ""], "at least one character"),
    ("stop", ["a", 3], r"but is 3"),
    ("stop", 7, "stop must be a string or a list of strings, but is 7"),
    ("stop", b"end", "stop must be a string or a list of strings"),
    ("stop", ["x"] * (MOST_STOPS + 1), "stop must be at most 16 strings, but is 17 of them"),
    ("stop_token_ids", 5, "stop_token_ids must be a list of token ids, but is 5"),
    ("stop_token_ids", [-1], "whole numbers of 0 or more, but is -1"),
    ("stop_token_ids", list(range(1025)), "at most 1024 ids, but are 1025"),
    ("stop_token_ids", [True], "but is True"),
    ("stop_token_ids", ["2"], r"but is '2' \(str\)"),
    ("stop_token_ids", [1.0], "but is 1.0"),
]


@pytest.mark.parametrize(("field", "value", "message"), WRONG, ids=lambda v: str(v)[:20])
def test_a_wrong_value_is_told_with_its_field_and_range(field, value, message):
    with pytest.raises(UsageError, match=message) as told:
        SamplingParams(**{field: value})
    assert str(told.value).startswith(field)


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400], ids=lambda v: str(v)[:6])
def test_numbers_are_finite(field, value):
    with pytest.raises(UsageError, match=f"{field} must be"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("field", NUMBERS + WHOLE)
@pytest.mark.parametrize("value", [True, "1", [1]], ids=str)
def test_a_number_is_no_bool_text_or_list(field, value):
    with pytest.raises(UsageError, match=rf"^{field} must be .*, a (whole )?number.*, but is "):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("field", WHOLE)
@pytest.mark.parametrize("value", [1.0, math.nan])
def test_a_whole_number_is_no_float(field, value):
    with pytest.raises(UsageError, match=f"{field} must be"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("field", FLAGS)
@pytest.mark.parametrize("value", [1, 0, None, "yes"])
def test_a_flag_is_a_bool(field, value):
    with pytest.raises(UsageError, match=f"{field} must be True or False, but is"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("field", [*NUMBERS, "n", "top_k", "max_tokens", "min_tokens"])
def test_only_what_may_be_off_may_be_none(field):
    with pytest.raises(UsageError, match=f"{field} must be"):
        SamplingParams(**{field: None})


def test_fields_that_contradict_each_other():
    with pytest.raises(UsageError, match="min_tokens must be at most max_tokens, which is 4, but is 5"):
        SamplingParams(max_tokens=4, min_tokens=5)
    with pytest.raises(UsageError, match="n must be 1 when greedy"):
        SamplingParams(n=2)
    assert SamplingParams(n=2, temperature=0.5).n == 2
    assert SamplingParams(max_tokens=4, min_tokens=4).min_tokens == 4


def test_every_field_has_a_rule():
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    others = {"stop", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words", "grammar"}
    assert names == set(RULES) | others
    assert names == {*NUMBERS, *WHOLE, *FLAGS, *others}, "each kind is tested above"


def test_defaults_are_greedy_and_frozen():
    params = SamplingParams()
    assert params.greedy and not params.penalised and params.stop == () and params.stop_token_ids == ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0
    with pytest.raises(TypeError):
        SamplingParams(temprature=1.0)


def test_stops_are_tuples():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None, stop_token_ids=None).stop == ()
    assert SamplingParams(stop_token_ids=[3, 2]).stop_token_ids == (3, 2)
    assert SamplingParams(stop=["x"] * MOST_STOPS).stop == ("x",) * MOST_STOPS
    assert dataclasses.replace(SamplingParams(stop="end"), n=1).stop == ("end",)
    assert len({SamplingParams(stop=["a"]), SamplingParams(stop="a")}) == 1, "equal and hashable"


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(0, 1e300) | st.integers(0, 9),
            "top_k": st.integers(-1, 10**30),
            "top_p": st.floats(0, 1, exclude_min=True),
            "min_p": st.floats(0, 1),
            "repetition_penalty": st.floats(1e-6, 1e6),
            "presence_penalty": st.floats(-2, 2),
            "frequency_penalty": st.floats(-2, 2),
            "seed": st.none() | st.integers(-(2**63), 2**64 - 1),
            "logprobs": st.none() | st.integers(0, 20),
            "stop": st.lists(st.text(min_size=1), max_size=16),
            "stop_token_ids": st.lists(st.integers(0, 10**9)),
        },
    )
)
def test_every_allowed_value_is_kept(fields):
    params = SamplingParams(**fields)
    for name, value in fields.items():
        assert getattr(params, name) == (tuple(value) if isinstance(value, list) else value)
