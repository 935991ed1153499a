"""From text, bytes, token ids or a conversation to tokens that the model can take."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from jinja2 import TemplateError

from graft.base.errors import EmptyPrompt, NotText, PromptTooLong, TokenizerMissing, UsageError
from graft.engine.params import SamplingParams
from graft.models.loaded import LoadedModel

Prompt = str | bytes | Sequence[int]
# A fast tokenizer may change its own settings in a call, and fails ("Already borrowed") if another thread is in it.
TOKENIZING = threading.Lock()


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A text, a list of token ids, or a list of either; arrays and tensors are lists."""
    if isinstance(prompts, (str, bytes)):
        return [prompts]
    given = plain_list(prompts)
    return [given] if given and isinstance(given[0], Integral) else given


def plain_list(given: Any) -> list[Any]:
    if hasattr(given, "tolist"):  # an array or a tensor
        given = given.tolist()
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        raise UsageError(f"a prompt is text, bytes or token ids, not a {type(given).__name__}")
    return list(given)


def encode(model: LoadedModel, prompt: Prompt) -> list[int]:
    if not isinstance(prompt, (str, bytes)):
        return check_ids(prompt, model.module.config.vocab_size)
    if model.tokenizer is None:
        raise TokenizerMissing(model.name)
    text = as_text(prompt)
    with TOKENIZING:
        return list(model.tokenizer(text)["input_ids"])


def plain_tokens(tokenizer: Any, text: str) -> list[int]:
    """Of a piece of text, without the special tokens that a prompt begins with."""
    with TOKENIZING:
        return list(tokenizer(as_text(text), add_special_tokens=False)["input_ids"])


def as_text(prompt: str | bytes) -> str:
    """UTF-8 bytes as text; text that UTF-8 cannot write (half of a surrogate pair) is refused."""
    try:
        if isinstance(prompt, bytes):
            return prompt.decode()
        prompt.encode()
    except UnicodeError as error:
        raise NotText(str(error)) from error
    return prompt


def check_ids(ids: Any, vocabulary: int) -> list[int]:
    found = plain_list(ids)
    if found and set(map(type, found)) == {int} and min(found) >= 0 and max(found) < vocabulary:
        return found  # 20,000 tokens in 1 ms, and not in 30
    for token in found:
        if not isinstance(token, Integral) or isinstance(token, bool):
            raise UsageError(f"token ids are whole numbers, but {token!r} is a {type(token).__name__}")
        if not 0 <= int(token) < vocabulary:
            raise UsageError(f"token id {token} is outside the vocabulary of {vocabulary}")
    return [int(token) for token in found]


def check_fits(ids: list[int], params: SamplingParams, context: int) -> None:
    if not ids:
        raise EmptyPrompt
    if len(ids) + params.max_tokens > context:
        raise PromptTooLong(len(ids), params.max_tokens, context)


def chat_tokens(model: LoadedModel, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The conversation in the model's chat template, up to where the answer begins."""
    if model.tokenizer is None:
        raise TokenizerMissing(model.name)
    if not model.tokenizer.chat_template:
        raise UsageError(f"{model.name} has no chat template; pass the prompt as it is")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str) or "role" not in message:
            raise UsageError(f'a message is {{"role": "user", "content": "…"}}, not {message!r}')
        as_text(message["content"])
    if not messages:
        raise EmptyPrompt
    try:
        with TOKENIZING:
            encoded = model.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, return_dict=True
            )
    except TemplateError as error:  # a template may refuse what it does not know: "roles must alternate"
        raise UsageError(f"the chat template of {model.name} refuses the conversation: {error}") from error
    return list(encoded["input_ids"])
