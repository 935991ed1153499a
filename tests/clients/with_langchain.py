"""langchain-openai: invoke, stream with usage, tools, structured output."""

from __future__ import annotations

import sys
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class City(BaseModel):
    name: Literal["Paris", "Rome"]  # a small model would write on until max_tokens
    population: int = Field(ge=0, le=99)


@tool
def get_weather(place: Literal["Oslo", "Rome"]) -> str:
    """The weather of a place."""
    return place


def main(base: str, model: str) -> None:
    chat = ChatOpenAI(base_url=base, api_key="any", model=model, temperature=0, max_tokens=60, stream_usage=True)
    asked = "What is the capital of France?"
    whole = chat.invoke(asked)
    assert whole.content and whole.usage_metadata["output_tokens"] > 0
    pieces = list(chat.stream(asked))
    assert "".join(one.content for one in pieces) == whole.content
    assert any(one.usage_metadata for one in pieces)
    called = chat.bind_tools([get_weather], tool_choice="required").invoke("The weather in Oslo?")
    assert called.tool_calls[0]["name"] == "get_weather" and "place" in called.tool_calls[0]["args"]
    for method in ("json_schema", "function_calling"):
        assert isinstance(chat.with_structured_output(City, method=method).invoke("Name a city."), City), method
    same = {"base_url": base, "api_key": "any", "model": model, "temperature": 0, "max_tokens": 60}
    by_responses = ChatOpenAI(**same, use_responses_api=True)
    assert by_responses.invoke(asked).text == whole.text


if __name__ == "__main__":
    main(*sys.argv[1:])
