"""Schemas that are no good: a 400 that names the field, found before the engine has heard of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from graft.base.errors import HttpRefused
from graft.engine.grammar import Grammars
from graft.engine.params import SamplingParams
from graft.serve.generation import structured
from graft.serve.probes import served_model
from graft.serve.protocol.regex_size import regex_size
from graft.serve.protocol.structure import MOST_STATES, AskedSchema, asked_format, call_schema, checked, moved
from graft.serve.text import ServedText
from graft.serve.wire import ServedModel
from serve_cases import tokenizer_json

pytest.importorskip("llguidance")

MODEL = ServedModel("mine", 64, 300, 1000, 4, tokenizer_json(), None, {}, (), [2])


def grammar_of(schema, model=MODEL):
    asked = AskedSchema("response_format", schema)
    return asyncio.run(structured(SamplingParams(), asked, ServedText(model))).grammar


GUIDED = [
    ({"guided_json": {"type": "boolean"}}, ["true", "false"], ["1", "truer"]),
    ({"guided_json": '{"type": "null"}'}, ["null"], ["true"]),
    ({"json_schema": {"enum": ["a"]}}, ['"a"'], ["a"]),
    ({"guided_regex": r"[0-9]{3}-[a-c]+"}, ["123-a", "000-cab"], ["12-a", "123-d", "123-"]),
    ({"guided_choice": ["yes", 'nö "\\\n', "yes", "y"]}, ["yes", 'nö "\\\n', "y"], ["no", "ye"]),
    ({"structured_outputs": {"regex": "a|b"}}, ["a", "b"], ["ab"]),
    ({"structured_outputs": {"choice": ["[x]"], "json": None}}, ["[x]"], ["x"]),
    ({"structured_outputs": {"json_object": True}}, ["{}"], ["[]"]),
    ({"structured_outputs": {"json": {"type": "integer", "maximum": 9, "minimum": 0}}}, ["7"], ["12"]),
]


def kept_to(text, grammar):
    """Whether the text is one that the grammar allows, as a whole."""
    served = ServedText(MODEL)
    mask = Grammars(MODEL.tokenizer, MODEL.vocabulary, MODEL.end_tokens).mask(grammar)
    for token in served.ids(text):
        if not mask.allowed()[token] or mask.accept(token) is not None:
            return False
    return bool(mask.allowed()[2])


@pytest.mark.parametrize(("body", "right", "wrong"), GUIDED)
def test_vllms_fields_say_what_an_answer_is(body, right, wrong):
    asked = asked_format(body)
    grammar = asyncio.run(structured(SamplingParams(), asked, ServedText(MODEL))).grammar
    assert [kept_to(text, grammar) for text in right] == [True] * len(right)
    assert [kept_to(text, grammar) for text in wrong] == [False] * len(wrong)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_json": 5}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_regex": "a" * 70_000}, "guided_regex"),
        ({"guided_regex": "((a{1000}){1000}){2}"}, "guided_regex"),
        ({"guided_choice": "yes"}, "guided_choice"),
        ({"guided_choice": ["yes", ""]}, "guided_choice"),
        ({"guided_grammar": "root ::= x"}, "guided_grammar"),
        ({"grammar": "root ::= x"}, "grammar"),
        ({"structured_outputs": 5}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ],
)
def test_vllms_fields_that_cannot_be_are_refused(body, param):
    assert refused(lambda: asked_format(body)).param == param


def test_fields_that_ask_for_nothing():
    assert (
        asked_format({"guided_json": None, "guided_choice": [], "structured_outputs": {"json_object": False}}) is None
    )


def test_a_regular_expression_that_is_none_is_told():
    error = refused(
        lambda: asyncio.run(structured(SamplingParams(), asked_format({"guided_regex": "(a"}), ServedText(MODEL)))
    )
    assert error.param == "guided_regex" and "unclosed group" in str(error) and error.code == "unsupported_schema"


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        (r"\d{3}-\d{4}", 8), ("(ab){3,5}c", 11), ("[]{9}]{3}", 3), (r"[\]a]{2}\{", 3), ("a{5,}", 5),
        ("((a{10}){10}){10}", 1000),
        ("a{", 2), ("(((", 0), ("a)b", 3), ("", 0), ("x{99999999999999}", 10**9), ("a|b*", 4),
    ],
)  # fmt: skip
def test_the_size_of_a_regular_expression(pattern, size):
    assert regex_size(pattern) == size


def test_the_largest_regular_expression_is_compiled():
    asked = asked_format({"guided_regex": f"((a{{100}}){{{MOST_STATES // 100}}})"})
    assert asyncio.run(structured(SamplingParams(), asked, ServedText(MODEL))).grammar


def refused(call):
    with pytest.raises(HttpRefused) as found:
        call()
    return found.value


def test_a_model_without_end_tokens_keeps_to_no_schema():
    assert grammar_of({"type": "boolean"})
    for ends in ([], [300]):
        error = refused(lambda ends=ends: grammar_of({"type": "boolean"}, replace(MODEL, end_tokens=ends)))
        assert (error.param, error.code) == ("response_format", "unsupported_parameter")
        assert "no end token" in str(error)


def test_the_http_process_is_told_of_end_tokens():
    part = SimpleNamespace(blocks=4, block_size=16, max_num_seqs=2, vocab_size=300)
    engine = SimpleNamespace(manager=part, scheduler=part, end_tokens=frozenset({9, 2}), pooling=None)
    model = SimpleNamespace(name="mine", context=64, module=SimpleNamespace(config=part))
    assert served_model(SimpleNamespace(model=model, engine=engine, tokenizer=None)).end_tokens == [2, 9]


@pytest.mark.parametrize(
    "schema", [{"properties": {"\ud800": {}}}, {"maximum": float("inf")}, {"minimum": 10**400}, {"enum": ["\udfff"]}]
)
def test_values_that_no_json_has(schema):
    error = refused(lambda: grammar_of(schema))
    assert (error.param, error.code) == ("response_format", "unsupported_schema")


def test_parameters_of_any_depth_are_refused_before_they_are_walked():
    deep = {}
    for _ in range(900):
        deep = {"not": deep}
    error = refused(lambda: call_schema([{"name": "f", "parameters": deep}], parallel=True))
    assert error.param == "tools" and "levels deep" in str(error)


def test_alternatives_are_counted_over_the_whole_schema():
    """Ambiguous ones take time by more than their number; these are in two places, each below the limit."""
    lists = [{"type": "array", "items": {"$ref": "#/$defs/n"}} for _ in range(150)]
    schema = {"$defs": {"n": {"anyOf": lists}}, "oneOf": [{"$ref": "#/$defs/n"}] * 107}
    error = refused(lambda: asked_format({"guided_json": schema}))
    assert error.code == "unsupported_schema" and "256 alternatives" in str(error)
    kinds = [{"type": "object", "properties": {"kind": {"const": f"k{i}"}}, "required": ["kind"]} for i in range(250)]
    asked = asked_format({"guided_json": {"anyOf": kinds}})
    assert asked is not None and grammar_of(asked.schema)


def test_references_move_and_values_do_not():
    value = {"$ref": "#/a", "in": [{"$ref": "#"}]}
    values = {"const": value, "enum": [value], "default": value, "examples": [value]}
    assert moved(values, "#/x") == values
    found = moved({"properties": {"const": {"$ref": "#/$defs/enum"}}, "$defs": {"enum": {"$ref": "#"}}}, "#/x")
    assert found == {"properties": {"const": {"$ref": "#/x/$defs/enum"}}, "$defs": {"enum": {"$ref": "#/x"}}}
    assert moved({"anyOf": [{"$ref": "#/a"}, {"$ref": "http://a"}]}, "#/x")["anyOf"] == [
        {"$ref": "#/x/a"}, {"$ref": "http://a"},
    ]  # fmt: skip


def of_multiples(*given):
    return [{"type": "number", "multipleOf": one} for one in given]


@pytest.mark.parametrize(
    "schema",
    [
        {"multipleOf": 999983},
        {"multipleOf": -999983},
        {"multipleOf": 1.00003},
        {"multipleOf": 1e300},
        {"multipleOf": 10**400},
        {"allOf": of_multiples(997, 991)},
        {"anyOf": [{"multipleOf": 5000, "minimum": least} for least in range(3)]},
        {"properties": {"a": {"items": {"allOf": of_multiples(0.97, 991)}}}},
    ],
)
def test_multiples_that_take_long_to_compile_are_refused(schema):
    assert refused(lambda: checked(schema, "response_format")).code == "unsupported_schema"
    assert refused(lambda: call_schema([{"name": "f", "parameters": schema}], parallel=False)).param == "tools"


def test_multiples_that_do_not():
    prices = {name: {"type": "number", "multipleOf": 0.01} for name in "abcdef"}
    for schema in (
        {"properties": prices}, {"anyOf": of_multiples(*[10] * 20)}, {"multipleOf": 9973}, {"multipleOf": 0},
        {"multipleOf": float("inf")}, {"multipleOf": "x"}, {"properties": {"multipleOf": {"multipleOf": True}}},
    ):  # fmt: skip
        assert checked(schema, "response_format").schema is schema
