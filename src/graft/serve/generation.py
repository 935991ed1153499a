"""One request from its tokens to its answer, whole or in events; the format is that of its endpoint."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from graft.base.errors import EngineFailed, ExtraMissing, GrammarRefused, HttpRefused, UsageError
from graft.engine.masks import word_tokens
from graft.engine.params import SamplingParams
from graft.engine.text.detokenize import TextStream
from graft.serve.link import EngineLink, Ticket
from graft.serve.protocol import answers
from graft.serve.protocol.answers import Envelope
from graft.serve.protocol.choices import Choice, Piece
from graft.serve.protocol.completions import CompletionFormat
from graft.serve.protocol.message_format import MessageFormat
from graft.serve.protocol.messages import PATH as MESSAGES
from graft.serve.protocol.messages import message_request
from graft.serve.protocol.requests import AskedChat, AskedCompletion, chat
from graft.serve.protocol.response_items import ResponseFormat
from graft.serve.protocol.responses import response
from graft.serve.protocol.sampling import as_refused, check_scores, check_tokens, fitted, prompt_room
from graft.serve.protocol.structure import AskedSchema
from graft.serve.protocol.token_answers import TokenFormat
from graft.serve.protocol.token_requests import AskedTokens
from graft.serve.protocol.tools import AskedTools
from graft.serve.protocol.truncation import cut
from graft.serve.protocol.values import Json
from graft.serve.text import ServedText
from graft.serve.tools.formats import FORCED
from graft.serve.tools.parser import ToolParser
from graft.serve.tools.reasoning import ThinkParser, begins_inside
from graft.serve.wire import AnswerRow, ServedModel, TokenLogprobs

TAIL = 16  # tokens of a prompt in which a mark at its end lies
# how endpoints that answer a conversation read what they are asked
CHATS: Mapping[str, Callable[[Json, Sequence[str]], AskedChat]] = {
    "/v1/chat/completions": chat, "/v1/responses": response, MESSAGES: message_request,
}  # fmt: skip


class AnswerFormat(Protocol):
    """How an endpoint writes an answer down. keeps: it wants the whole text at the end of a stream."""

    @property
    def keeps(self) -> bool: ...
    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]: ...
    def begin(self) -> bytes: ...
    def chunk(self, choice: Choice, piece: Piece, choices: Sequence[Choice]) -> bytes: ...
    def end(self, choices: Sequence[Choice]) -> bytes: ...


@dataclass(eq=False)
class Generation:
    """A request that the engine may be given."""

    prompts: Sequence[list[int]]
    params: Sequence[SamplingParams]  # of each prompt
    stream: bool
    text: ServedText
    format: AnswerFormat
    silent: bool = False  # nothing of what comes is shown
    textless: bool = False  # tokens alone are
    priority: int = 0
    singly: bool = False  # each token is a piece of its own, where it has logprobs
    parser: Callable[[], ToolParser] | None = None  # one a choice, where calls are looked for
    thinker: Callable[[], ThinkParser] | None = None  # and where thoughts are
    found: dict[int, Choice] = field(default_factory=dict)
    scores: dict[int, Sequence[TokenLogprobs]] = field(default_factory=dict)  # of prompts
    ticket: Ticket | None = None

    @property
    def choices(self) -> list[Choice]:
        return [self.found[index] for index in sorted(self.found)]

    def enter(self, link: EngineLink) -> Ticket:
        self.ticket = link.submit(self.prompts, self.params, follow=self.stream, priority=self.priority)
        for prompt in range(len(self.prompts)):  # now, while the engine is at it, and not with its first token
            self.choice(prompt, 0)
        return self.ticket

    def take(self, prompt: int, row: AnswerRow) -> list[tuple[Choice, Piece]]:
        if row.error is not None:
            raise EngineFailed(row.error)
        choice = self.choice(prompt, row.sample)
        if row.prompt_logprobs is not None:  # in the first row of the first sample
            self.scores[prompt] = row.prompt_logprobs
        choice.prompt_logprobs = self.scores.get(prompt)
        return [(choice, choice.take(one)) for one in (row.singles() if self.singly else [row])]

    def choice(self, prompt: int, sample: int) -> Choice:
        params = self.params[prompt]
        index = prompt * params.n + sample
        choice = self.found.get(index)
        if choice is None:
            known = self.text.tokenizer is not None and not self.textless
            parser = None if self.parser is None else self.parser()
            thinker = None if self.thinker is None else self.thinker()
            shown, marks = params, () if parser is None else parser.format.openings
            if thinker is not None:
                marks = (*marks, thinker.marks.opening, thinker.marks.closing)
            if any(map(self.text.is_special, marks)):
                shown = replace(params, skip_special_tokens=False)
            stream = TextStream(self.text, self.prompts[prompt], shown) if known else None
            choice = Choice(index, params, stream, self.format.keeps, silent=self.silent, parser=parser)
            choice.thinker = thinker
            self.found[index] = choice
        return choice

    async def answer(self, ticket: Ticket) -> bytes:
        """All of it, as one JSON text."""
        while ticket.left or ticket.rows:
            for prompt, row in await ticket.read():
                self.take(prompt, row)
        return answers.encode(self.format.whole(self.choices))

    async def events(self, ticket: Ticket) -> AsyncGenerator[bytes]:
        """Server-sent events: all that came at once is one piece."""
        begun = False
        while ticket.left or ticket.rows:
            rows = await ticket.read()
            if not rows:
                yield answers.PING  # somebody rang who had nothing to say: see EventStream
            pairs = [pair for prompt, row in rows for pair in self.take(prompt, row)]
            made = [] if begun or not rows else [self.format.begin()]  # before the chunks: events may be numbered
            made += [self.format.chunk(choice, piece, self.choices) for choice, piece in pairs]
            begun = begun or bool(rows)
            if found := b"".join(made):
                yield found
        yield self.format.end(self.choices)

    @property
    def finish_reasons(self) -> str:
        return ",".join(sorted({choice.last.finish_reason or "" for choice in self.choices if choice.last}))


def new_id() -> str:
    return uuid.uuid4().hex


async def from_completion(
    asked: AskedCompletion, text: ServedText, model: ServedModel, request_id: str
) -> Generation:
    encoded = iter(await text.encode_all([one for one in asked.prompts if isinstance(one, str)]))
    whole = [next(encoded) if isinstance(one, str) else one for one in asked.prompts]
    prompts = [cut(asked.truncation, ids, prompt_room(asked.params, model)) for ids in whole]
    params = [fitted(asked.params, len(ids), model.context, model.cache_tokens) for ids in prompts]
    check_scores(asked.params, sum(map(len, prompts)), "prompt_logprobs" if asked.prompt_logprobs else "logprobs")
    before = []
    if asked.echo:
        given = zip(asked.prompts, whole, prompts, strict=True)
        before = [one if isinstance(one, str) and ids is all_ids else text.decode(ids) for one, all_ids, ids in given]
    if asked.params.stop:
        _ = text.known  # stop strings need a tokenizer
    envelope = Envelope(f"cmpl-{request_id}", int(time.time()), asked.model, chat=False)
    await check_masks(asked.params, text, model)
    params = [await structured(one, asked.schema, text) for one in params]
    made = CompletionFormat(asked, envelope, prompts, text, before)
    return Generation(prompts, params, asked.stream, text, made, asked.silent, priority=asked.priority)


async def from_chat(asked: AskedChat, text: ServedText, model: ServedModel, request_id: str) -> Generation:
    ids, params = await chat_prompt(asked, text, model)
    envelope = Envelope(f"chatcmpl-{request_id}", int(time.time()), asked.model, chat=True)
    made = CompletionFormat(asked, envelope, [ids], text)
    return chat_generation(asked, ids, params, text, made)


def chat_generation(
    asked: AskedChat, ids: list[int], params: SamplingParams, text: ServedText, made: AnswerFormat
) -> Generation:
    parser, thinker = parser_for(asked.tools, text), thinker_for(asked, ids, text)
    return Generation(
        [ids], [params], asked.stream, text, made, priority=asked.priority, parser=parser, thinker=thinker
    )


def thinker_for(asked: AskedChat, prompt: list[int], text: ServedText) -> Callable[[], ThinkParser] | None:
    """None where the model does not mark what it thinks, and where a grammar leaves no room for it."""
    marks = text.think_marks
    if marks is None or asked.schema is not None:
        return None
    before = asked.messages[-1]["content"] if asked.continues else ""
    inside = before.rfind(marks.opening) > before.rfind(marks.closing)
    inside = inside or begins_inside(marks, text.decode(prompt[-TAIL:], skip_special_tokens=False))
    return lambda: ThinkParser(marks, "inside" if inside else "before")


def parser_for(tools: AskedTools | None, text: ServedText) -> Callable[[], ToolParser] | None:
    if tools is None:
        return None
    found = text.tool_format if tools.schema is None else FORCED
    return lambda: ToolParser(found, tools.names, None if tools.parallel else 1)


async def from_response(
    asked: AskedChat, text: ServedText, model: ServedModel, request_id: str, body: Json
) -> Generation:
    ids, params = await chat_prompt(asked, text, model)
    made = ResponseFormat(asked, request_id, int(time.time()), len(ids), body, text)
    found = chat_generation(asked, ids, params, text, made)
    found.singly = params.logprobs is not None
    return found


async def from_tokens(asked: AskedTokens, text: ServedText, model: ServedModel, request_id: str) -> Generation:
    ids = cut(asked.truncation, list(asked.prompt), prompt_room(asked.params, model))
    params = fitted(asked.params, len(ids), model.context, model.cache_tokens)
    check_scores(params, len(ids), "prompt_logprobs")
    await check_masks(params, text, model)
    params = await structured(params, asked.schema, text)
    made = TokenFormat(asked, asked.request_id or request_id, int(time.time()), ids, text)
    return Generation([ids], [params], asked.stream, text, made, textless=True, priority=asked.priority)


async def from_message(asked: AskedChat, text: ServedText, model: ServedModel, request_id: str) -> Generation:
    ids, params = await chat_prompt(asked, text, model)
    made = MessageFormat(asked, request_id, len(ids), params.max_tokens)
    return chat_generation(asked, ids, params, text, made)


async def cut_prompt(asked: AskedChat, text: ServedText, model: ServedModel) -> list[int]:
    room = prompt_room(asked.params, model, clamped=asked.clamped)
    return cut(asked.truncation, await prompt_of(asked, text), room)


async def prompt_of(asked: AskedChat, text: ServedText) -> list[int]:
    tools = None if asked.tools is None else asked.tools.tools
    return await text.chat(
        asked.messages, generation=asked.generation_prompt, options=asked.template_options, tools=tools,
        continues=asked.continues,
    )  # fmt: skip


async def chat_prompt(asked: AskedChat, text: ServedText, model: ServedModel) -> tuple[list[int], SamplingParams]:
    await check_masks(asked.params, text, model)
    ids = await cut_prompt(asked, text, model)
    params = fitted(asked.params, len(ids), model.context, model.cache_tokens, clamped=asked.clamped)
    check_scores(params, len(ids), "prompt_logprobs")
    return ids, await structured(params, asked.schema or strict_calls(asked.tools, text), text)


async def check_masks(params: SamplingParams, text: ServedText, model: ServedModel) -> None:
    """What would be the client's error is found before the engine is asked."""
    check_tokens(params, model)
    if not params.bad_words:
        return
    _ = text.known  # words need a tokenizer
    try:
        await asyncio.to_thread(word_tokens, params.bad_words, partial(text.ids, special=False))
    except UsageError as error:
        raise as_refused(error) from error


def strict_calls(tools: AskedTools | None, text: ServedText) -> AskedSchema | None:
    """What calls must be, where the model may make some; refused where calls have no mark that they begin with."""
    if tools is None or tools.strict is None:
        return None
    form = text.tool_format
    if form.bare or not form.openings:
        raise HttpRefused(
            f"tools: calls in the format {form.name} have no mark before them, so that only a call that must be made"
            " can be held to its schema: give tool_choice required, or the function's name, or no strict",
            param="tools",
            code="unsupported_parameter",
        )
    return replace(tools.strict, marks=(form.openings[0], form.closing))


async def structured(params: SamplingParams, schema: AskedSchema | None, text: ServedText) -> SamplingParams:
    """With the grammar that the answer must keep to. A schema that cannot be kept to is told by its part."""
    if schema is None:
        return params
    try:
        grammar = await asyncio.to_thread(text.grammar, schema)
    except HttpRefused:
        raise
    except GrammarRefused as error:
        what = "schema" if schema.regex is None else "regular expression"
        why = f"{schema.param}: this {what} cannot be kept to: {error.why}"
        raise HttpRefused(why, param=schema.param, code="unsupported_schema") from error
    except (ExtraMissing, UsageError) as error:  # of this server or its model: no schema can be kept to
        raise HttpRefused(str(error), param=schema.param, code="unsupported_parameter") from error
    try:
        return replace(params, grammar=grammar)
    except UsageError as error:
        raise as_refused(error) from error
