"""One request from its tokens to its answer, whole or in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from graft.base.errors import EngineFailed
from graft.engine.params import SamplingParams
from graft.engine.text.detokenize import TextStream
from graft.serve.link import EngineLink, Ticket
from graft.serve.protocol import answers
from graft.serve.protocol.answers import Envelope
from graft.serve.protocol.choices import Choice, Piece
from graft.serve.protocol.requests import Asked, AskedChat, AskedCompletion
from graft.serve.protocol.sampling import fitted
from graft.serve.text import ServedText
from graft.serve.wire import AnswerRow, ServedModel


@dataclass(eq=False)
class Generation:
    """A request that the engine may be given. before: texts of the prompts, where they are echoed."""

    asked: Asked
    envelope: Envelope
    prompts: Sequence[list[int]]
    params: Sequence[SamplingParams]
    text: ServedText
    before: Sequence[str] = ()
    choices: dict[int, Choice] = field(default_factory=dict)
    ticket: Ticket | None = None

    def enter(self, link: EngineLink) -> Ticket:
        self.ticket = link.submit(self.prompts, self.params, follow=self.asked.stream)
        return self.ticket

    def take(self, prompt: int, row: AnswerRow) -> tuple[Choice, Piece]:
        if row.error is not None:
            raise EngineFailed(row.error)
        index = prompt * self.asked.params.n + row.sample
        choice = self.choices.get(index)
        if choice is None:
            params, known = self.params[prompt], self.text.tokenizer is not None
            stream = TextStream(self.text, self.prompts[prompt], params) if known else None
            choice = self.choices[index] = Choice(index, params, stream)
        return choice, choice.take(row)

    async def answer(self, ticket: Ticket) -> bytes:
        """All of it, as one JSON text."""
        while ticket.left or ticket.rows:
            for prompt, row in await ticket.read():
                self.take(prompt, row)
        each = [self.choices[index] for index in sorted(self.choices)]
        made = [self.finished(choice) for choice in each]
        return answers.encode({**self.envelope.body(made, chunk=False), "usage": self.usage()})

    def finished(self, choice: Choice) -> dict[str, object]:
        piece = choice.whole()
        if self.envelope.chat:
            return answers.chat_choice(choice, piece, self.text) | self.ids(choice, piece)
        return answers.text_choice(choice, piece, self.text, self.echo(choice)) | self.ids(choice, piece)

    def ids(self, choice: Choice, piece: Piece) -> dict[str, object]:
        """Of the answer or the chunk, and of the prompt once."""
        if not self.asked.return_token_ids:
            return {}
        prompt = None if choice.begun else self.prompts[choice.index // choice.params.n]
        return {"token_ids": list(piece.tokens), "prompt_token_ids": prompt}

    async def events(self, ticket: Ticket) -> AsyncGenerator[bytes]:
        """Server-sent events: all that came at once is one piece."""
        while ticket.left or ticket.rows:
            made, rows = [], await ticket.read()
            if not rows:
                yield answers.PING  # somebody rang who had nothing to say: see EventStream
            for prompt, row in rows:
                choice, piece = self.take(prompt, row)
                if answers.says_something(choice, piece) or self.asked.return_token_ids:
                    made.append(self.chunk(choice, piece))
            if made:
                yield b"".join(made)
        last = b""
        if self.asked.include_usage:
            last = answers.event({**self.envelope.body([], chunk=True), "usage": self.usage()})
        yield last + answers.DONE

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        if self.envelope.chat:
            made = answers.chat_chunk(choice, piece, self.text)
        else:
            made = answers.text_choice(choice, piece, self.text, "" if choice.begun else self.echo(choice))
        made |= self.ids(choice, piece)
        choice.begun = True
        if not self.asked.include_usage:
            return self.envelope.chunk(made)
        return self.envelope.chunk(made, self.usage() if self.asked.usage_in_chunks else None)

    def echo(self, choice: Choice) -> str:
        return self.before[choice.index // choice.params.n] if self.before else ""

    def usage(self) -> dict[str, object]:
        return answers.usage(sum(map(len, self.prompts)), self.choices.values())

    @property
    def finish_reasons(self) -> str:
        return ",".join(sorted({piece.finish_reason or "" for c in self.choices.values() for piece in c.pieces[-1:]}))


def envelope(asked: Asked, request_id: str) -> Envelope:
    chat = isinstance(asked, AskedChat)
    return Envelope(f"{'chatcmpl' if chat else 'cmpl'}-{request_id}", int(time.time()), asked.model, chat)


def new_id() -> str:
    return uuid.uuid4().hex


async def from_completion(
    asked: AskedCompletion, text: ServedText, model: ServedModel, request_id: str
) -> Generation:
    prompts = [await text.encode(one) if isinstance(one, str) else one for one in asked.prompts]
    params = [fitted(asked.params, len(ids), model.context, model.cache_tokens) for ids in prompts]
    before = []
    if asked.echo:
        before = [one if isinstance(one, str) else text.decode(one) for one in asked.prompts]
    if asked.params.stop:
        _ = text.known  # stop strings need a tokenizer
    return Generation(asked, envelope(asked, request_id), prompts, params, text, before)


async def from_chat(asked: AskedChat, text: ServedText, model: ServedModel, request_id: str) -> Generation:
    ids = await text.chat(asked.messages, generation=asked.generation_prompt, options=asked.template_options)
    params = fitted(asked.params, len(ids), model.context, model.cache_tokens)
    return Generation(asked, envelope(asked, request_id), [ids], [params], text)
