"""From the fields of a body to SamplingParams. What would change the answer and is not there yet is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from graft.base.errors import HttpRefused, UsageError
from graft.engine.params import MOST_LOGPROBS, SamplingParams, bias_problem, check_biased
from graft.serve.protocol.values import Json, boolean, mapping, text, whole, wrong

# taken as they are; SamplingParams checks them. The rest of OpenAI's and vLLM's fields are ignored, as both do.
FIELDS = (
    "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "seed", "skip_special_tokens", "min_tokens",
    "prompt_logprobs",
)  # fmt: skip
DEFAULT_TEMPERATURE = 1.0  # OpenAI's
MOST_SAMPLES = 128  # OpenAI's bound of n
# logprobs of prompts in one answer: tokens x (likeliest + 1) x n. They are written at once, 4 us and 50 bytes each
MOST_SCORES = 65_536
UNBOUNDED = 2**31  # stands for max_tokens until the length of the prompt is known

# field: (values that ask for nothing, what is refused)
REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "functions": (lambda v: v == [], "the older form of tools is not supported; give tools"),
    "function_call": (lambda v: v in ("none", "auto"), "the older form of tool_choice is not supported"),
    "allowed_token_ids": (lambda v: v == [], "the engine cannot restrict tokens"),
    "bad_words": (lambda v: v == [], "the engine cannot restrict tokens"),
    "use_beam_search": (lambda v: v is False, "there is no beam search"),
    "suffix": (lambda v: v == "", "the model fills in nothing; there is no suffix"),
    "truncate_prompt_tokens": (lambda _: False, "prompts are never truncated"),
    "chat_template": (lambda _: False, "templates come from the model alone"),
    "documents": (lambda v: v == [], "documents are not supported"),
    "audio": (lambda _: False, "the answer is text alone"),
    "modalities": (lambda v: v == ["text"], "the answer is text alone"),
}


def refuse_unsupported(body: Json) -> None:
    """Nothing that a client relies on is silently left out."""
    for name, (harmless, why) in REFUSED.items():
        if body.get(name) is not None and not harmless(body[name]):
            raise HttpRefused(f"{name}: {why}", param=name, code="unsupported_parameter")
    best = body.get("best_of")
    if best is not None and best != (1 if body.get("n") is None else body["n"]):
        raise HttpRefused("best_of: must be left out or equal to n", param="best_of", code="unsupported_parameter")


def sampling(body: Json, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    """max_tokens=None: all that fits; `fitted` puts it in."""
    refuse_unsupported(body)
    whole(body, "n", 1, MOST_SAMPLES)
    fields = {name: body[name] for name in FIELDS if body.get(name) is not None}
    fields.setdefault("temperature", DEFAULT_TEMPERATURE)
    try:
        return SamplingParams(
            **fields, max_tokens=max_tokens or UNBOUNDED, logprobs=logprobs, stop=stop_strings(body),
            logit_bias=biases(body),
        )  # fmt: skip
    except UsageError as error:
        raise as_refused(error) from error


def stop_strings(body: Json) -> tuple[str, ...]:
    stop = body.get("stop")
    if stop is None:
        return ()
    if not isinstance(stop, (str, list)):
        raise wrong("stop", "a string or a list of strings", stop)
    return tuple(text(one, "stop") for one in ([stop] if isinstance(stop, str) else stop))


def biases(body: Json) -> dict[int, float]:
    """JSON has token ids as strings. Whether they are of the vocabulary: `check_biases`."""
    given = mapping(body, "logit_bias")
    check_biased(len(given))
    for token in given:
        if not re.fullmatch(r"[0-9]{1,9}", token):
            raise HttpRefused(f"logit_bias: {token!r:.40} is no token id", param="logit_bias")
    return {int(token): bias for token, bias in given.items()}


def check_biases(params: SamplingParams, vocabulary: int) -> None:
    if (why := bias_problem(params, vocabulary)) is not None:
        raise HttpRefused(why, param="logit_bias")


def check_barred(params: SamplingParams, vocabulary: int, end_tokens: Collection[int]) -> None:
    """A token at least must be left while the answer may not end."""
    barred = {token for token in (*(params.stop_token_ids or ()), *end_tokens) if token < vocabulary}
    if params.min_tokens and len(barred) >= vocabulary:
        raise HttpRefused("min_tokens: stop_token_ids leaves no token that would not end it", param="min_tokens")


def check_scores(params: SamplingParams, tokens: int, param: str) -> None:
    """tokens: of all prompts. param: the field that asked for their logprobs, which every choice repeats."""
    if params.prompt_logprobs is None:
        return
    asked = tokens * (params.prompt_logprobs + 1) * params.n
    if asked > MOST_SCORES:
        raise HttpRefused(
            f"{param}: {tokens} tokens of prompts x {params.prompt_logprobs + 1} x n={params.n} are {asked} logprobs"
            f" in one answer, of which {MOST_SCORES} are allowed; ask for fewer of them, or in"
            " several requests",
            param=param,
        )


def as_refused(error: UsageError) -> HttpRefused:
    """The engine's own sentence begins with the field."""
    if isinstance(error, HttpRefused):
        return error
    return HttpRefused(str(error), param=str(error).partition(" ")[0])


def fitted(
    params: SamplingParams, prompt: int, context: int, cache_tokens: int, *, clamped: bool = False
) -> SamplingParams:
    """With max_tokens where it was left out, or is `clamped` to what there is room for. prompt: its tokens. A request
    that could never run is refused."""
    if not prompt:
        raise HttpRefused("the prompt has no tokens; give at least one", param="prompt")
    # one token more than the rest of the cache: the last one is never fed back
    room = min(context - prompt, cache_tokens - prompt + 1)
    if clamped and room < 1:  # in the words by which agents know that they have to shorten a conversation
        raise HttpRefused(
            f"prompt is too long: {prompt} tokens > {prompt + room - 1} maximum",
            param="prompt",
            code="context_length_exceeded",
        )
    if params.max_tokens == UNBOUNDED or (clamped and params.max_tokens > room):
        try:
            params = replace(params, max_tokens=max(room, 1))
        except UsageError as error:
            raise as_refused(error) from error
    asked = prompt + params.max_tokens
    if asked > context:
        raise HttpRefused(
            f"the prompt has {prompt} tokens and {params.max_tokens} new ones are asked for, but the context is"
            f" {context}; shorten the prompt or lower max_tokens",
            param="max_tokens" if prompt < context else "prompt",
            code="context_length_exceeded",
        )
    if asked - 1 > cache_tokens:
        raise HttpRefused(
            f"the prompt has {prompt} tokens and {params.max_tokens} new ones are asked for, but the key-value cache"
            f" holds {cache_tokens} tokens; lower max_tokens",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return params


def token_bound(body: Json, *names: str) -> int | None:
    """max_tokens by any of its names, the newer first."""
    for name in names:
        if (found := whole(body, name, 1, UNBOUNDED - 1)) is not None:
            return found
    return None


def chat_logprobs(body: Json) -> int | None:
    """Chat has a switch and a number, completions a number alone."""
    top = whole(body, "top_logprobs", 0, MOST_LOGPROBS)
    if not boolean(body, "logprobs"):
        if top:
            raise HttpRefused("top_logprobs needs logprobs: true", param="top_logprobs")
        return None
    return top or 0
