"""openai's own client: chat, completions, responses, streams, tools, pydantic models, errors."""

from __future__ import annotations

import json
import sys
from typing import Literal

import openai
from pydantic import BaseModel, Field

USER = [{"role": "user", "content": "What is the capital of France?"}]


class City(BaseModel):
    name: Literal["Paris", "Rome"]  # a small model would write on until max_tokens
    population: int = Field(ge=0, le=99)


class GetWeather(BaseModel):
    """The weather of a place."""

    place: Literal["Oslo", "Rome"]


def strict(answer):
    type(answer).model_validate(answer.model_dump(), strict=True)
    return answer


def check_logprobs(client: openai.OpenAI, model: str) -> None:
    """Of a response, whole and in its events; and of what may be said at all, by vLLM's field."""
    asked = {"model": model, "input": USER, "temperature": 0, "max_output_tokens": 6, "top_logprobs": 2}
    wanted = {**asked, "include": ["message.output_text.logprobs"]}
    (part,) = strict(client.responses.create(**wanted)).output[0].content
    assert len(part.logprobs) == 6 and "".join(one.token for one in part.logprobs) == part.text
    assert all(one.logprob == one.top_logprobs[0].logprob and len(one.top_logprobs) == 2 for one in part.logprobs)
    told = [strict(event) for event in client.responses.create(**wanted, stream=True)]
    pieces = [event for event in told if event.type == "response.output_text.delta"]
    assert [one.token for event in pieces for one in event.logprobs] == [one.token for one in part.logprobs]
    only = {"allowed_token_ids": [30, 31], "return_token_ids": True, "truncate_prompt_tokens": 3}
    text = client.completions.create(model=model, prompt="The capital of France is", max_tokens=5, extra_body=only)
    assert set(text.choices[0].token_ids) <= {30, 31} and text.usage.prompt_tokens == 3


def main(base: str, model: str) -> None:
    client = openai.OpenAI(base_url=base, api_key="any", max_retries=0, timeout=120)
    chat = {"model": model, "messages": USER, "temperature": 0, "max_tokens": 24}
    whole = strict(client.chat.completions.create(**chat))
    assert whole.choices[0].message.content
    chunks = list(client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True}))
    assert "".join(one.choices[0].delta.content or "" for one in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    text = strict(client.completions.create(model=model, prompt="The capital of France is", temperature=0))
    assert text.choices[0].text.startswith(" Paris")
    made = strict(client.responses.create(model=model, input=USER, temperature=0, max_output_tokens=24))
    assert made.output_text == whole.choices[0].message.content
    events = client.responses.create(model=model, input=USER, temperature=0, max_output_tokens=24, stream=True)
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(pieces) == made.output_text
    check_logprobs(client, model)
    parsed = client.chat.completions.parse(**chat | {"max_tokens": 60}, response_format=City)
    assert isinstance(parsed.choices[0].message.parsed, City)
    typed = client.responses.parse(model=model, input=USER, text_format=City, max_output_tokens=60)
    assert isinstance(typed.output_parsed, City)
    tool = openai.pydantic_function_tool(GetWeather)
    called = client.chat.completions.parse(**chat | {"max_tokens": 60}, tools=[tool], tool_choice="required")
    (call,) = called.choices[0].message.tool_calls[:1]
    assert isinstance(call.function.parsed_arguments, GetWeather)
    flat = {"type": "function", **tool["function"]}
    made = client.responses.create(
        model=model, input=USER, tools=[flat], tool_choice="required", max_output_tokens=60
    )
    assert set(json.loads(made.output[0].arguments)) == {"place"}
    assert model in [one.id for one in client.models.list()]
    try:
        client.chat.completions.create(**chat | {"model": "other"})
    except openai.NotFoundError as error:
        assert error.code == "model_not_found"
    else:
        raise AssertionError("a model that is not there has answered")


if __name__ == "__main__":
    main(*sys.argv[1:])
