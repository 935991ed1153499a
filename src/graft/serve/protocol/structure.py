"""What an answer must look like: response_format, text.format, vLLM's structured_outputs and guided_* and llama.cpp's
json_schema, and calls that must be made."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from graft.base.errors import HttpRefused
from graft.serve.protocol.regex_size import regex_size
from graft.serve.protocol.values import Json, mapping, text, wrong

MOST_CHARACTERS = 65_536  # of a schema
DEEPEST = 32
# states that multipleOf may take, one a remainder: 9,973 of them compile in 0.1 s, 99,991 in 1.2 s, 999,983 in 20 s
MOST_REMAINDERS = 10_000
# of anyOf and oneOf: where they are ambiguous, 200 compile in 0.5 s, some hundreds more in 30 s
MOST_ALTERNATIVES = 256
MOST_STATES = 20_000  # of a regular expression: 1,000,000 repeated characters compile in 5 s
ANY_OBJECT: Json = {"type": "object"}
VALUES = frozenset({"const", "enum", "default", "examples"})  # JSON as it is: nothing in them is a schema
NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})  # keys are names


@dataclass(frozen=True)
class AskedSchema:
    """param: the field that it came from, for whoever finds something wrong with it. The answer is JSON of the
    schema; or a text of the regular expression, or one of the choices; or any text in which JSON of the schema stands
    between two marks."""

    param: str
    schema: Json
    regex: str | None = None
    choices: tuple[str, ...] = ()
    marks: tuple[str, str] | None = None


# by vLLM's names in structured_outputs, what older clients of it and those of llama.cpp send
OUTER = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
    "json_schema": "json", "grammar": "grammar",
}  # fmt: skip


def asked_format(body: Json) -> AskedSchema | None:
    """Of chat and completions."""
    return the_one(body, response_format(body))


def the_one(body: Json, plain: AskedSchema | None) -> AskedSchema | None:
    """plain: by OpenAI's own field. Two are refused."""
    inner = mapping(body, "structured_outputs")
    given = {f"structured_outputs.{name}": (name, value) for name, value in inner.items()}
    given |= {name: (kind, body[name]) for name, kind in OUTER.items() if name in body}
    found = [made for param, (kind, value) in given.items() if (made := guided(kind, value, param)) is not None]
    if plain is not None:
        found.append(plain)
    if len(found) > 1:
        both = " and ".join(one.param for one in found[:2])
        raise HttpRefused(f"{both} each say what the answer must be; give one of them", param=found[0].param)
    return found[0] if found else None


def response_format(body: Json) -> AskedSchema | None:
    """{"type": "json_schema", "json_schema": {"schema": {…}}}."""
    given = mapping(body, "response_format")
    kind = given.get("type") if given else "text"
    if kind == "json_schema":
        return checked(mapping(given, "json_schema").get("schema"), "response_format.json_schema.schema")
    return simple(kind, "response_format")


def guided(kind: str, value: object, param: str) -> AskedSchema | None:
    """vLLM's. Values that ask for nothing give None."""
    if value in (None, "", [], {}, False):
        return None
    if kind == "json":
        return checked(parse_schema(value, param) if isinstance(value, str) else value, param)
    if kind == "json_object":
        return AskedSchema(param, ANY_OBJECT)
    if kind == "regex":
        if regex_size(pattern := short(value, param)) > MOST_STATES:
            why = f"{param}: with its repetitions written out it may have {MOST_STATES} characters"
            raise HttpRefused(why, param=param, code="unsupported_schema")
        return AskedSchema(param, {}, regex=pattern)
    if kind == "choice":
        if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
            raise wrong(param, "a list of texts, none of them empty", value)
        short("".join(value), param)
        return AskedSchema(param, {}, choices=tuple(dict.fromkeys(text(one, param) for one in value)))
    why = "grammars in GBNF or Lark are not taken" if kind == "grammar" else "this is not known"
    raise HttpRefused(
        f"{param}: {why}; give a JSON schema, a regex or choices", param=param, code="unsupported_parameter"
    )


def parse_schema(given: str, param: str) -> object:
    try:
        return json.loads(short(given, param))
    except (ValueError, RecursionError) as error:
        raise HttpRefused(f"{param} is not valid JSON: {error}", param=param) from error


def short(given: object, param: str) -> str:
    if len(found := text(given, param)) > MOST_CHARACTERS:
        raise too_long(param)
    return found


def text_format(body: Json) -> AskedSchema | None:
    """text.format of responses: {"type": "json_schema", "schema": {…}}."""
    given = mapping(mapping(body, "text"), "format")
    kind = given.get("type") if given else "text"
    schema = given.get("schema")
    plain = checked(schema, "text.format.schema") if kind == "json_schema" else simple(kind, "text.format")
    return the_one(body, plain)


def simple(kind: object, param: str) -> AskedSchema | None:
    if kind not in ("text", "json_object"):
        raise HttpRefused(
            f"{param}: its type must be text, json_object or json_schema, not {kind!r:.40}",
            param=param.partition(".")[0],
            code="unsupported_parameter",
        )
    return None if kind == "text" else AskedSchema(param, ANY_OBJECT)


def checked(schema: object, param: str) -> AskedSchema:
    if not isinstance(schema, Mapping):
        raise wrong(param, "a JSON schema, an object", schema)
    bound(schema, param)
    if len(json.dumps(schema)) > MOST_CHARACTERS:
        raise too_long(param)
    if remainders(schema) > MOST_REMAINDERS:
        why = f"{param}: all multipleOf together may have {MOST_REMAINDERS} remainders, by sum and common multiple"
        raise HttpRefused(why, param=param, code="unsupported_schema")
    return AskedSchema(param, schema)


def too_long(param: str) -> HttpRefused:
    return HttpRefused(f"{param} may have {MOST_CHARACTERS} characters", param=param)


def bound(value: object, param: str) -> None:
    """Refuses what is too deep, too long or has too many alternatives. No more is walked than may be there: a value
    has a character or more."""
    left, size, alternatives = [(value, 0)], 0, 0
    while left:
        one, depth = left.pop()
        if depth > DEEPEST:
            raise HttpRefused(f"{param} may be {DEEPEST} levels deep", param=param)
        size += len(one) if isinstance(one, (Mapping, list, str)) else 1
        if size > MOST_CHARACTERS:
            raise too_long(param)
        if isinstance(one, Mapping):
            size += sum(map(len, one))
            branches = (one.get(name) for name in ("anyOf", "oneOf"))
            alternatives += sum(len(each) for each in branches if isinstance(each, list))
            if alternatives > MOST_ALTERNATIVES:
                why = f"{param}: all anyOf and oneOf together may have {MOST_ALTERNATIVES} alternatives"
                raise HttpRefused(why, param=param, code="unsupported_schema")
        inner = one.values() if isinstance(one, Mapping) else one if isinstance(one, list) else ()
        left += [(each, depth + 1) for each in inner]


def remainders(schema: Json) -> int:
    """A bound of the states of its automaton: apart they add up, and in one number (allOf, anyOf) their least common
    multiple counts. Decimals are scaled to whole numbers each by itself: 0.25 is 25; a common scale gives no more.
    """
    found = [max(whole_multiple(one), 1) for one in multiples(schema)]
    total = sum(found)
    return total if total > MOST_REMAINDERS else max(total, math.lcm(*found))


def multiples(value: object) -> Iterator[Decimal]:
    given = value.get("multipleOf") if isinstance(value, Mapping) else None
    if isinstance(given, (int, float)) and not isinstance(given, bool) and (found := Decimal(str(given))).is_finite():
        yield found
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for one in inner:
        yield from multiples(one)


def whole_multiple(value: Decimal) -> int:
    digits, exponent = value.normalize().as_tuple()[1:]
    return int("".join(map(str, digits))) * 10 ** max(int(exponent), 0)


def call_schema(functions: Sequence[Json], parallel: bool) -> AskedSchema:
    """A list of calls of these functions, one at least."""
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": call_schemas(functions, "#/items/anyOf")}}
    return checked(schema if parallel else schema | {"maxItems": 1}, "tools")


def marked_call_schema(functions: Sequence[Json], parallel: bool) -> AskedSchema:
    """Of what stands between the marks of a call, as models write it: a call, or a list of calls. Functions that are
    not strict take any object."""
    held = [one if one.get("strict") else {"name": one["name"]} for one in functions]
    calls = call_schemas(held, "#/$defs/call/anyOf")
    listed = {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/call"}}
    either = [{"$ref": "#/$defs/call"}, listed if parallel else listed | {"maxItems": 1}]
    return checked({"anyOf": either, "$defs": {"call": {"anyOf": calls}}}, "tools")


def call_schemas(functions: Sequence[Json], root: str) -> list[Json]:
    """Of a call of each of these functions. root: where the list will stand in the whole."""
    for one in functions:
        checked(one.get("parameters") or ANY_OBJECT, "tools")  # before anything walks down into it
    return [
        {
            "type": "object",
            "properties": {
                "name": {"const": one["name"]},
                "arguments": moved(one.get("parameters") or ANY_OBJECT, f"{root}/{index}/properties/arguments"),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for index, one in enumerate(functions)
    ]


def moved(schema: Any, root: str, names: bool = False) -> Any:
    """A schema that is part of another: what it refers to lies below `root` now. names: its keys are no keywords."""
    if isinstance(schema, list):
        return [moved(one, root) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    if names:
        return {name: moved(value, root) for name, value in schema.items()}
    found = {key: value if key in VALUES else moved(value, root, key in NAMED) for key, value in schema.items()}
    target = schema.get("$ref")
    return found | {"$ref": root + target[1:]} if isinstance(target, str) and target.startswith("#") else found
