"""anthropic's Python client: messages, events, tools, schemas, counts, errors; every answer and event by its types.

python with_anthropic.py URL MODEL
"""

from __future__ import annotations

import sys

import anthropic
from anthropic.types import Message

URL, MODEL = sys.argv[1].removesuffix("/v1"), sys.argv[2]
client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=600)
GREEDY = {"extra_body": {"temperature": 0}}  # which newer versions have no argument for
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"name": "get_weather", "description": "The weather of a city", "input_schema": CITY}
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


def strict(found):
    """Its types are never checked unless one asks for it."""
    type(found).model_validate(found.model_dump(), strict=True)
    return found


def ask(messages=CAPITAL, **more) -> Message:
    return strict(client.messages.create(model=MODEL, messages=messages, **{"max_tokens": 40, **GREEDY, **more}))


def main() -> None:
    whole = ask()
    assert whole.content[0].text and whole.stop_reason in ("end_turn", "max_tokens"), whole
    brief = ask(system=[{"type": "text", "text": "You are brief.", "cache_control": {"type": "ephemeral"}}])
    counted = client.messages.count_tokens(model=MODEL, messages=CAPITAL, system="You are brief.")
    assert counted.input_tokens == brief.usage.input_tokens + brief.usage.cache_read_input_tokens
    word = whole.content[0].text.split()[2]
    again = ask(stop_sequences=[word])
    assert (again.stop_reason, again.stop_sequence) == ("stop_sequence", word)
    begun = [*CAPITAL, {"role": "assistant", "content": "The capital of France is"}]
    assert "Paris" in ask(begun, max_tokens=4).content[0].text

    with client.messages.stream(model=MODEL, messages=CAPITAL, max_tokens=40, **GREEDY) as stream:
        events = [strict(event) for event in stream]
        final = strict(stream.get_final_message())
    assert final.content[0].text == ask().content[0].text and len(events) > 5

    weather = [{"role": "user", "content": "What is the weather in Oslo?"}]
    choice = {"type": "tool", "name": "get_weather"}
    called = ask(weather, tools=[TOOL], tool_choice=choice, max_tokens=100)
    (call,) = called.content
    assert call.type == "tool_use" and list(call.input) == ["city"] and called.stop_reason == "tool_use", called
    with client.messages.stream(
        model=MODEL, messages=weather, tools=[TOOL], tool_choice=choice, max_tokens=100, **GREEDY
    ) as stream:
        assert strict(stream.get_final_message()).content[0].input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "12 degrees and rain"}
    turns = [*weather, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    assert ask(turns, tools=[TOOL]).content

    formed = ask(weather, output_config={"format": {"type": "json_schema", "schema": CITY}}, max_tokens=100)
    assert formed.content[0].text.startswith('{"city":"'), formed

    for wrong, error in (
        ({"model": "other"}, anthropic.NotFoundError),
        ({"extra_body": {"temperature": -1}}, anthropic.BadRequestError),
    ):
        try:
            client.messages.create(**{"model": MODEL, "messages": CAPITAL, "max_tokens": 5, **wrong})
        except error as refused:
            assert refused.body["error"]["message"] and refused.request_id
        else:
            raise AssertionError(f"{wrong} was taken")


main()
