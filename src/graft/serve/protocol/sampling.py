"""From the fields of a body to SamplingParams. What would change the answer and is not there yet is refused."""

from __future__ import annotations

import re
from dataclasses import replace

from graft.base.errors import HttpRefused, UsageError
from graft.engine.masks import mask_problem
from graft.engine.params import MOST_LOGPROBS, SamplingParams, check_biased
from graft.serve.protocol.scheduling import CACHE_SALT
from graft.serve.protocol.values import Json, Refused, boolean, mapping, refuse_fields, text, whole, wrong
from graft.serve.wire import ServedModel

# taken as they are; SamplingParams checks them. The rest of OpenAI's and vLLM's fields are ignored, as both do.
FIELDS = (
    "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "seed", "skip_special_tokens", "min_tokens",
    "prompt_logprobs", "allowed_token_ids", "bad_words",
)  # fmt: skip
DEFAULT_TEMPERATURE = 1.0  # OpenAI's
MOST_SAMPLES = 128  # OpenAI's bound of n
# logprobs of prompts in one answer: tokens x (likeliest + 1) x n. They are written at once, 4 us and 50 bytes each
MOST_SCORES = 65_536
UNBOUNDED = 2**31  # stands for max_tokens until the length of the prompt is known

REFUSED: Refused = {
    **CACHE_SALT,
    "functions": (lambda v: v == [], "the older form of tools is not supported; give tools"),
    "function_call": (lambda v: v in ("none", "auto"), "the older form of tool_choice is not supported"),
    "use_beam_search": (lambda v: v is False, "there is no beam search"),
    "suffix": (lambda v: v == "", "the model fills in nothing; there is no suffix"),
    "chat_template": (lambda _: False, "templates come from the model alone"),
    "documents": (lambda v: v == [], "documents are not supported"),
    "audio": (lambda _: False, "the answer is text alone"),
    "modalities": (lambda v: v == ["text"], "the answer is text alone"),
}


def refuse_unsupported(body: Json) -> None:
    refuse_fields(body, REFUSED)
    best = body.get("best_of")
    if best is not None and best != (1 if body.get("n") is None else body["n"]):
        raise HttpRefused("best_of: must be left out or equal to n", param="best_of", code="unsupported_parameter")


def sampling(body: Json, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    """max_tokens=None: all that fits; `fitted` puts it in."""
    refuse_unsupported(body)
    whole(body, "n", 1, MOST_SAMPLES)
    fields = {name: body[name] for name in FIELDS if body.get(name) is not None}
    fields.setdefault("temperature", DEFAULT_TEMPERATURE)
    if isinstance(words := body.get("bad_words"), list):
        fields["bad_words"] = [text(word, "bad_words") for word in words]
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
    """JSON has token ids as strings. Whether they are of the vocabulary: `check_tokens`."""
    given = mapping(body, "logit_bias")
    check_biased(len(given))
    for token in given:
        if not re.fullmatch(r"[0-9]{1,9}", token):
            raise HttpRefused(f"logit_bias: {token!r:.40} is no token id", param="logit_bias")
    return {int(token): bias for token, bias in given.items()}


def check_tokens(params: SamplingParams, model: ServedModel) -> None:
    """Those that it names are of the vocabulary, and one is left while the answer may not end."""
    if (why := mask_problem(params, model.vocabulary, model.end_tokens)) is not None:
        raise HttpRefused(why, param=why.partition(":")[0])


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
    return HttpRefused(str(error), param=str(error).partition(" ")[0].rstrip(":"))


def room_for(model: ServedModel) -> int:
    """Tokens of a prompt and its answer. One more than the cache has: the last one is never fed back."""
    return min(model.context, model.cache_tokens + 1)


def prompt_room(params: SamplingParams, model: ServedModel, *, clamped: bool = False) -> int:
    """Tokens that a prompt may have beside the answer that is asked for, or beside one token of it."""
    least = 1 if clamped or params.max_tokens == UNBOUNDED else params.max_tokens
    return room_for(model) - least


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
