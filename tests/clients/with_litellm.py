"""litellm: chat, streams put together by its builder, text completions."""

from __future__ import annotations

import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks the network

import litellm


def main(base: str, model: str) -> None:
    where = {"api_base": base, "api_key": "any", "temperature": 0, "max_tokens": 24, "timeout": 120}
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    whole = litellm.completion(model=f"openai/{model}", messages=asked, **where)
    assert whole.choices[0].message.content and whole.usage.total_tokens > 0
    options = {"include_usage": True}
    pieces = list(
        litellm.completion(model=f"openai/{model}", messages=asked, stream=True, stream_options=options, **where)
    )
    built = litellm.stream_chunk_builder(pieces, messages=asked)
    assert built.choices[0].message.content == whole.choices[0].message.content
    assert built.usage.total_tokens == whole.usage.total_tokens
    text = litellm.text_completion(
        model=f"text-completion-openai/{model}", prompt="The capital of France is", **where
    )
    assert text.choices[0].text.startswith(" Paris")


if __name__ == "__main__":
    main(*sys.argv[1:])
