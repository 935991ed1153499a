"""Grammars: whatever the model would say, the text keeps to the schema; and nobody else's changes."""

from __future__ import annotations

import json
import random
import sys

import pytest
from tokenizers import Tokenizer

from capture_cases import engine
from graft.base.errors import ExtraMissing, GrammarRefused, UsageError
from graft.engine.params import SamplingParams
from serve_cases import tokenizer_json
from text_llm import llm_with_text

pytest.importorskip("llguidance")
from graft.engine.grammar import GrammarMask, Grammars, byte_level, json_grammar, marked_grammar, token_count

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}


def keeps_to_schema(text):
    found = json.loads(text)
    assert list(found) == list(SCHEMA["properties"]) and len(found["name"]) <= 6 and found["kind"] in ("cat", "dog")
    assert isinstance(found["age"], int) and 0 <= found["age"] <= 150
    assert len(found["tags"]) <= 2 and all(isinstance(tag, bool) for tag in found["tags"])
    assert text == json.dumps(found, ensure_ascii=False, separators=(",", ":")) or "\\" in text


@pytest.mark.parametrize("record", [True, False])
def test_random_models_write_what_the_schema_says(record):
    llm, source = llm_with_text(record), random.Random(1)
    prompts = [[source.randrange(3, 128) for _ in range(5)] for _ in range(6)]
    grammar = json_grammar(SCHEMA)
    hot = [SamplingParams(max_tokens=200, temperature=1.5, seed=i, grammar=grammar, n=2) for i in range(6)]
    plain = SamplingParams(max_tokens=30, temperature=1.0, seed=3, ignore_eos=True)
    alone = llm.generate(prompts, plain)
    found = llm.generate([*prompts, *prompts], [*hot, *[plain] * 6])
    assert [one.token_ids for one in found[6:]] == [one.token_ids for one in alone]
    for one in found[:6]:
        for each in (one, *one.alternatives):
            assert each.finish_reason == "stop" and each.token_ids[-1] == 2
            keeps_to_schema(each.text)
    assert len({one.text for one in found[:6]}) > 1
    cut = llm.generate(prompts[0], SamplingParams(max_tokens=3, grammar=grammar))[0]
    assert cut.finish_reason == "length" and cut.text == '{"n'
    assert llm.engine.idle and llm.engine.manager.available == llm.engine.manager.blocks


def test_tokens_have_the_bytes_that_they_decode_to():
    """Also where several decoders are in a row, as in tokenizers that were made from GGUF files."""
    spec = json.loads(tokenizer_json())
    mixed = [{"type": "ByteFallback"}, {"type": "Fuse"}, spec["decoder"]]
    spec["decoder"] = {"type": "Sequence", "decoders": mixed}
    plain = Tokenizer.from_str(tokenizer_json())
    for text in (tokenizer_json(), json.dumps(spec)):
        tokens = Grammars(text, 300, [2]).tokens
        for token in range(3, plain.get_vocab_size()):
            whole = plain.decode([token], skip_special_tokens=False)
            if "\ufffd" not in whole:
                assert tokens.decode_bytes([token]) == whole.encode(), token
    assert json.loads(byte_level(json.loads(tokenizer_json())))["decoder"]["type"] == "ByteLevel"


@pytest.mark.parametrize(
    ("schema", "part"),
    [
        ({"type": "object", "properties": {"a": {"if": {}}}}, "if"),
        ({"type": "foo"}, "foo"),
        ({"$ref": "#/none"}, "/none"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "format": "made-up"}, "made-up"),
        ({"$ref": "#"}, "NoExtension"),  # found by its first mask alone
    ],
)
def test_a_schema_that_cannot_be_done_is_refused_by_its_part(schema, part):
    grammars = Grammars(tokenizer_json(), 300, [2])
    with pytest.raises(GrammarRefused, match=part):
        grammars.mask(json_grammar(schema))
    assert not grammars.made


CALL = {
    "type": "object",
    "properties": {
        "name": {"const": "f"},
        "arguments": SCHEMA | {"properties": {"n": {"type": "integer"}}, "required": ["n"]},
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("No call < at <tool all", ""),
        ('So: <tool_call>\n{"name": "f", "arguments": {"n": 3}}\n</tool_call>', ""),
        ('<tool_call>{"name": "f", "arguments": {"n": 3}}</tool_call> <tool_call>{"name": "f"', ""),
        ('<tool_call>{"name": "g"', 'g"'),
        ('<tool_call>{"name": "f", "arguments": {"m"', 'm"'),
        ('<tool_call>{"name": "f", "arguments": {"n": "', '"'),
        ('<tool_call>{"name": "f", "arguments": {"n": 3}} </tool_call>', " </tool_call>"),
    ],
)
@pytest.mark.parametrize("special", [False, True])
def test_any_text_with_json_between_marks(text, refused, special):
    """`refused`: the rest of the text, from the first byte on that the grammar forbids."""
    spec = json.loads(tokenizer_json())
    if special:
        spec["added_tokens"].append(spec["added_tokens"][0] | {"id": 300, "content": "<tool_call>"})
    whole = Tokenizer.from_str(json.dumps(spec))
    mask = Grammars(json.dumps(spec), 301, [2]).mask(marked_grammar(CALL, "<tool_call>", "</tool_call>", special))
    at = 0
    for token, (start, _) in zip((found := whole.encode(text)).ids, found.offsets, strict=True):
        if not mask.allowed()[token]:
            break
        assert mask.accept(token) is None
        at = start + 1
    else:
        assert not refused
        assert bool(mask.allowed()[2]) == (not text.endswith('"f"')), "it may end, but not within a call"
        return
    assert refused and text[at:].endswith(refused)


def test_grammars_are_compiled_once_and_copied():
    grammars = Grammars(tokenizer_json(), 300, [2])
    grammar = json_grammar({"const": 12})
    one, other = grammars.mask(grammar), grammars.mask(grammar)
    (first,) = one.allowed().nonzero()[0]
    assert one.accept(int(first)) is None and len(grammars.made) == 1
    assert other.allowed()[first] and not one.allowed()[first]  # where one stands does not move the other
    assert one.accept(7) is not None  # what is not allowed is told


def test_what_contradicts_a_grammar(monkeypatch):
    for more in ({"ignore_eos": True}, {"min_tokens": 2}):
        with pytest.raises(UsageError, match="contradicts a grammar"):
            SamplingParams(grammar="x", **more)
    llm = engine("llama", False)
    with pytest.raises(UsageError, match="has no tokenizer"):
        llm.generate([1, 2], SamplingParams(grammar="x"))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ExtraMissing, match="llguidance"):
        json_grammar({})


def test_a_grammar_that_cannot_go_on_ends_its_request_with_logprobs_of_every_token(monkeypatch):
    monkeypatch.setattr(GrammarMask, "accept", lambda *_: "lost")
    params = SamplingParams(max_tokens=8, grammar=json_grammar({"type": "boolean"}), logprobs=0)
    found = llm_with_text(False).generate([5, 6, 7], params)[0]
    assert found.finish_reason == "error" and "lost" in str(found.error)
    assert len(found.logprobs) == len(found.token_ids) == 1


def test_end_tokens_outside_of_the_vocabulary():
    """A tokenizer may have more tokens than its model; one of them may be an end token."""
    llm, params = llm_with_text(False), SamplingParams(max_tokens=30, grammar=json_grammar({"type": "boolean"}))
    llm.engine.end_tokens = frozenset({2, 500})
    assert llm.generate([5, 6, 7], params)[0].text in ("true", "false")
    for ends in ([300, 500], []):
        with pytest.raises(UsageError, match="no end token lies in the vocabulary of 300"):
            Grammars(tokenizer_json(), 300, ends)


def test_a_tokenizer_that_the_library_cannot_read_is_refused():
    spec = json.loads(tokenizer_json())
    spec["decoder"], spec["pre_tokenizer"] = None, None
    with pytest.raises(UsageError, match="with this tokenizer"):
        Grammars(json.dumps(spec), 300, [2])


def test_tokens_are_counted_as_the_tokenizer_does():
    spec = json.loads(tokenizer_json())
    assert token_count(spec) == Tokenizer.from_str(tokenizer_json()).get_vocab_size()
    unigram = {"model": {"vocab": [["a", 0.0], ["b", -1.0]]}, "added_tokens": [{"content": "b"}, {"content": "c"}]}
    assert token_count(unigram) == 3


def wide(ways):
    """Arrays of arrays, each of which may be read in so many ways."""
    inner = {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/d"}} for _ in range(ways)]}
    return {"$defs": {"d": inner}, "$ref": "#/$defs/d"}


def optional(properties):
    return {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(properties)}}


def test_grammars_whose_masks_would_take_long_are_refused():
    grammars = Grammars(tokenizer_json(), 300, [2])
    either = optional(200)["properties"] | {"q": {"anyOf": [{"type": "string"}, {"type": "null"}]}}
    for schema, most in ((wide(200), 600), (optional(600), 2000), ({"type": "object", "properties": either}, 600)):
        with pytest.raises(GrammarRefused, match=rf"row has \d+ items; max is {most}") as found:
            grammars.mask(json_grammar(schema))
        assert "verbose" not in str(found.value)
    assert grammars.mask(json_grammar(optional(400))).allowed().any()
    calls = [{"properties": {"name": {"const": f"f{index}"}, "arguments": optional(3)}} for index in range(128)]
    calls = [{"type": "object", "required": ["name", "arguments"], **one} for one in calls]
    for schema in (wide(20), optional(140), {"anyOf": calls}, {"enum": list(range(1000))}):
        assert grammars.mask(json_grammar(schema)).allowed().any()
    (bracket,) = grammars.tokens.tokenize_bytes(b"[")
    mask = grammars.mask(
        json_grammar({"type": "array", "items": wide(200)["$defs"]["d"], "$defs": wide(200)["$defs"]})
    )
    assert mask.accept(bracket) is None and "max is 600" in mask.accept(bracket)  # deeper: when it is met
