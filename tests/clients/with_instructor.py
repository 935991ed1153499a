"""instructor: pydantic models by tools and by JSON schema."""

from __future__ import annotations

import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, Field


class City(BaseModel):
    name: Literal["Paris", "Rome"]  # a small model would write on until max_tokens
    population: int = Field(ge=0, le=99)


def main(base: str, model: str) -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        plain = openai.OpenAI(base_url=base, api_key="any", timeout=120)
        client = instructor.from_openai(plain, mode=mode)
        asked = [{"role": "user", "content": "Name a city and its population."}]
        found = client.chat.completions.create(
            model=model, messages=asked, response_model=City, max_tokens=80, temperature=0, max_retries=1
        )
        assert isinstance(found, City), mode


if __name__ == "__main__":
    main(*sys.argv[1:])
