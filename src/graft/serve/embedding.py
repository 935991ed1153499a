"""/v1/embeddings: texts or token ids in, vectors out, for a server that was started with --runner pooling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from graft.base.errors import EngineFailed, HttpRefused
from graft.engine.params import SamplingParams
from graft.serve.link import EngineLink, Ticket
from graft.serve.protocol import answers, values
from graft.serve.protocol.requests import prompts, served_name
from graft.serve.protocol.scheduling import CACHE_SALT, priority
from graft.serve.protocol.truncation import Truncation, cut, truncation
from graft.serve.protocol.values import Json
from graft.serve.text import ServedText
from graft.serve.wire import ServedModel, as_base64, from_base64

FORMATS = ("float", "base64")
# OpenAI's bound; a text may have many tokens, so --max-num-batched-tokens and the queue bound the work
MOST_INPUTS = 2048
UNSUPPORTED = ("messages", "normalize", "use_activation", "embed_dtype", "endianness")


@dataclass(frozen=True)
class AskedEmbeddings:
    """inputs: texts or token ids. dimensions: what vectors are cut to."""

    model: str
    inputs: Sequence[str | list[int]]
    base64: bool
    dimensions: int | None
    truncation: Truncation | None = None
    priority: int = 0


def asked_embeddings(body: Json, names: Sequence[str], model: ServedModel) -> AskedEmbeddings:
    name = served_name(body, names)
    if (refused := values.one_of(body, UNSUPPORTED)) is not None:
        raise HttpRefused(f"{refused} is not supported here", param=refused, code="unsupported_parameter")
    values.refuse_fields(body, CACHE_SALT)
    form = body.get("encoding_format") or "float"
    if form not in FORMATS:
        raise values.wrong("encoding_format", "float or base64", form)
    inputs = prompts(body.get("input"), model.vocabulary, "input")
    if len(inputs) > MOST_INPUTS:
        raise HttpRefused(f"input may have {MOST_INPUTS} texts, but has {len(inputs)}", param="input")
    dimensions = asked_dimensions(body, model)
    return AskedEmbeddings(name, inputs, form == "base64", dimensions, truncation(body, "right"), priority(body))


def asked_dimensions(body: Json, model: ServedModel) -> int | None:
    """Vectors may be cut where the model was trained for it, and says so."""
    asked = values.whole(body, "dimensions", 1, 1 << 20)
    if asked is None or asked == model.width:
        return None
    allowed = model.matryoshka
    if allowed is not None and not allowed:
        raise HttpRefused(
            f"dimensions: vectors of {model.name} have {model.width}, and its config.json says neither is_matryoshka"
            " nor matryoshka_dimensions, so that a part of one means nothing; leave it out",
            param="dimensions",
            code="unsupported_parameter",
        )
    if asked > model.width or (allowed is not None and asked not in allowed):
        which = f"one of {', '.join(map(str, allowed))}" if allowed is not None else f"at most {model.width}"
        raise HttpRefused(f"dimensions must be {which}, but is {asked}", param="dimensions")
    return asked


@dataclass(eq=False)
class Embedding:
    """A request that the engine may be given."""

    asked: AskedEmbeddings
    prompts: Sequence[list[int]]
    found: dict[int, str] = field(default_factory=dict)  # by the prompt's index
    ticket: Ticket | None = None

    def enter(self, link: EngineLink) -> Ticket:
        params = [SamplingParams(max_tokens=1)] * len(self.prompts)
        self.ticket = link.submit(self.prompts, params, follow=False, priority=self.asked.priority)
        return self.ticket

    async def answer(self, ticket: Ticket) -> bytes:
        while ticket.left or ticket.rows:
            for prompt, row in await ticket.read():
                if row.error is not None or row.embedding is None:
                    raise EngineFailed(row.error or "the engine gave no embedding")
                self.found[prompt] = row.embedding
        return answers.encode(self.whole())

    def whole(self) -> dict[str, Any]:
        tokens = sum(map(len, self.prompts))
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": self.vector(self.found[index])}
                for index in range(len(self.prompts))
            ],
            "model": self.asked.model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    def vector(self, given: str) -> list[float] | str:
        if self.asked.dimensions is None:
            return given if self.asked.base64 else from_base64(given)
        some = from_base64(given)[: self.asked.dimensions]
        length = math.sqrt(sum(one * one for one in some)) or 1.0
        some = [one / length for one in some]
        return as_base64(some) if self.asked.base64 else some

    @property
    def finish_reasons(self) -> str:
        return "stop" if len(self.found) == len(self.prompts) else ""


async def from_embeddings(asked: AskedEmbeddings, text: ServedText, model: ServedModel) -> Embedding:
    encoded = iter(await text.encode_all([one for one in asked.inputs if isinstance(one, str)]))
    most = min(model.context, model.cache_tokens)
    whole = [next(encoded) if isinstance(one, str) else one for one in asked.inputs]
    given = [cut(asked.truncation, ids, most) for ids in whole]
    for index, ids in enumerate(given):
        if not ids:
            raise HttpRefused(f"input {index} has no tokens; leave it out", param="input")
        if len(ids) > most:
            why = f"input {index} has {len(ids)} tokens, and the model takes {most}; shorten it"
            raise HttpRefused(why, param="input", code="context_length_exceeded")
    return Embedding(asked, given)
