"""/inference/v1/generate, vLLM's: token ids in, token ids out, for routers and trainers that have the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graft.base.errors import HttpRefused
from graft.engine.params import MOST_LOGPROBS
from graft.serve.protocol.requests import Asked, served_name, streaming
from graft.serve.protocol.sampling import sampling, token_bound
from graft.serve.protocol.scheduling import CACHE_SALT, priority
from graft.serve.protocol.structure import asked_format
from graft.serve.protocol.truncation import truncation
from graft.serve.protocol.values import Json, Refused, mapping, refuse_fields, text, token_ids, whole

PATH = "/inference/v1/generate"
REFUSED: Refused = {
    **CACHE_SALT,
    "features": (lambda _: False, "the model takes tokens alone"),
    "content_parts": (lambda v: v == [], "the model takes tokens alone"),
    "output_mode": (
        lambda v: v == "tokens",
        "only tokens come out; /v1/completions with return_token_ids has texts",
    ),
    "kv_transfer_params": (lambda v: v == {}, "no keys and values are sent or fetched"),
    "ec_transfer_params": (lambda v: v == {}, "no keys and values are sent or fetched"),
}


@dataclass(frozen=True)
class AskedTokens(Asked):
    prompt: Sequence[int] = ()
    request_id: str | None = None


def token_request(body: Json, names: Sequence[str], vocabulary: int) -> AskedTokens:
    """sampling_params are an object of their own, by the names of SamplingParams."""
    name = served_name(body, names)
    refuse_fields(body, REFUSED)
    own = mapping(body, "sampling_params")
    logprobs = whole(own, "logprobs", 0, MOST_LOGPROBS)
    params = sampling(own, token_bound(own, "max_tokens"), logprobs)
    common = streaming({**body, "prompt_logprobs": own.get("prompt_logprobs")})
    prompt = token_ids(body.get("token_ids"), "token_ids", vocabulary)
    if not prompt:
        raise HttpRefused("token_ids: the prompt has no tokens; give at least one", param="token_ids")
    given = body.get("request_id")
    return AskedTokens(
        name, params, **common, schema=asked_format(own), truncation=truncation(own), priority=priority(body),
        prompt=prompt, request_id=None if given is None else text(given, "request_id"),
    )  # fmt: skip
