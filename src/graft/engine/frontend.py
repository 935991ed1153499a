"""What an LLM is asked for, from any thread or coroutine: requests go to the driver, answers are waited for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any

from graft.base.errors import GraftError, TokenizerMissing, UsageError
from graft.base.files import Progress
from graft.engine.core import EmbeddingOutput, Output, Request, Stats
from graft.engine.driver import Driver
from graft.engine.engine import Engine
from graft.engine.grammar import Grammars
from graft.engine.masks import OnlyThese, TokenMask, WithoutWords, joined, mask_problem, word_tokens
from graft.engine.params import SamplingParams
from graft.engine.pooling import PoolingEngine
from graft.engine.prompts import Prompt, as_list, chat_tokens, check_fits, encode, plain_tokens
from graft.engine.watch import TaskWatch, ThreadWatch
from graft.models.loaded import LoadedModel


class Frontend:
    """A model and the driver of its engine. Every method may be called from any thread; requests share batches."""

    model: LoadedModel
    driver: Driver

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        progress: Progress | None = None,
    ) -> list[Output]:
        """Completes every prompt; they run together. `params` and `priority` (lower goes first) are one for all, or
        one each.

        A prompt that cannot run does not stop the others: its Output has finish_reason "error" and the error. Where
        none can run, the first error is raised.
        """
        entered = self.requests(prompts, params, priority)
        self.finish([entry for entry in entered if isinstance(entry, Request)], progress, new=True)
        return [self.output(entry) for entry in entered]

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> list[Output]:
        """`generate` for a coroutine. Cancelling its task ends the requests."""
        entered = self.requests(prompts, params, priority)
        watch = TaskWatch(entry for entry in entered if isinstance(entry, Request))
        try:
            self.driver.enter(watch.requests, watch)
            while await watch.wait():
                pass
        finally:
            self.driver.abort(watch.requests)
        return [self.output(entry) for entry in entered]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        priority: int | Sequence[int] = 0,
        progress: Progress | None = None,
    ) -> list[EmbeddingOutput]:
        """A vector for every prompt; they run together. For an LLM with runner="pooling". A prompt that cannot run
        does not stop the others, as with `generate`."""
        asked = as_list(prompts)
        ranks = one_each("priorities", priority, len(asked))
        made = [self.attempt(partial(self.embedding_request, *one)) for one in zip(asked, ranks, strict=True)]
        entered = some_can_run(made)
        self.finish([entry for entry in entered if isinstance(entry, Request)], progress, new=True)
        return [self.embedding_output(entry) for entry in entered]

    def requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int],
    ) -> list[Request | GraftError]:
        """A request for each prompt, or why it cannot run; raises the first error where none can."""
        asked = as_list(prompts)
        each = one_each("sampling parameters", params or SamplingParams(), len(asked))
        ranks = one_each("priorities", priority, len(asked))
        triples = zip(asked, each, ranks, strict=True)
        return some_can_run([self.attempt(partial(self.request, *one)) for one in triples])

    def finish(self, requests: Sequence[Request], progress: Progress | None = None, *, new: bool = False) -> None:
        """Waits until these requests have ended. new: they are handed to the engine first. Whoever breaks off ends
        them."""
        watch = ThreadWatch(requests)
        total = left = len(watch.open)
        try:
            if new:
                self.driver.enter(requests, watch)
            else:
                self.driver.watch(watch)
            while left:
                if progress:
                    progress("generating", total - left, total)
                left = watch.wait()
        finally:
            self.driver.abort(requests)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0) -> Iterator[str]:
        """Yields pieces of text as they come; together they are the text that `generate` gives."""
        return self.follow(self.submit(prompt, self.one_text(params), priority=priority))

    async def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> AsyncIterator[str]:
        """`stream` for a coroutine: `async for piece in llm.astream(…)`. The request begins with the first piece."""
        request = self.submit(prompt, self.one_text(params), priority=priority)
        given, watch = 0, TaskWatch([request], each_token=True)
        try:
            self.driver.watch(watch)
            while await watch.wait():
                if len(text := request.read_text()) > given:
                    yield text[given:]
                given = len(text)
            if last := request.read_text()[given:]:
                yield last
            if request.error is not None:
                raise request.error
        finally:
            self.driver.abort([request])

    def follow(self, request: Request) -> Iterator[str]:
        """The text of a request, piece by piece. Whoever stops reading, or drops it unread, cancels the request."""
        pieces = self.pieces(request)
        next(pieces)  # begun: what is dropped from here on runs its `finally`
        return pieces

    def pieces(self, request: Request) -> Iterator[str]:
        given, watch = 0, ThreadWatch([request], each_token=True)
        try:
            self.driver.watch(watch)
            yield ""
            while watch.wait():
                if len(text := request.read_text()) > given:
                    yield text[given:]
                given = len(text)
            if last := request.read_text()[given:]:
                yield last
            if request.error is not None:
                raise request.error
        finally:
            self.driver.abort([request])

    def one_text(self, params: SamplingParams | None) -> SamplingParams:
        if self.tokenizer is None:
            raise TokenizerMissing(self.model.name)
        if params is not None and params.n > 1:
            raise UsageError(f"a stream is one text, but n is {params.n}; use generate")
        return params or SamplingParams()

    def chat(self, messages: Sequence[Mapping[str, str]], params: SamplingParams | None = None) -> Output:
        """The model's answer to a conversation: [{"role": "user", "content": "…"}, …]."""
        return self.generate(self.chat_prompt(messages), params)[0]

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The conversation in the model's own chat template, as tokens, up to where the answer begins."""
        return chat_tokens(self.model, messages)

    @property
    def engine(self) -> Engine:
        return self.driver.engine

    @engine.setter
    def engine(self, engine: Engine) -> None:
        self.driver = Driver(engine)

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    @property
    def stats(self) -> Stats:
        """Times and counts since the engine was last idle."""
        return self.engine.stats

    def submit(self, prompt: Prompt, params: SamplingParams, *, priority: int = 0) -> Request:
        """Hands a request to the engine, where it runs from now on; `follow` reads it, `abort` ends it early."""
        request = self.request(prompt, params, priority)
        self.driver.enter([request])
        return request

    def abort(self, *requests: Request) -> None:
        """Ends requests that have not ended, after the present step, and frees their part of the cache."""
        self.driver.abort(requests)

    def held(self) -> AbstractContextManager[Engine]:
        """`with llm.held() as engine`: for whoever steps the engine (`engine.add`, `engine.step`, `engine.abort`) or
        looks into it. It is the calling thread's alone meanwhile; requests of others wait."""
        return self.driver.held()

    def embedding_request(self, prompt: Prompt, priority: int = 0) -> Request:
        if not isinstance(self.engine, PoolingEngine):
            raise UsageError(f'{self.model.name} was loaded to generate; LLM(…, runner="pooling") embeds')
        if not isinstance(priority, int):
            raise UsageError(f"a priority is a whole number, not {priority!r}")
        return self.engine.embed(self.encode(prompt), self.model.context, priority=priority)

    def request(self, prompt: Prompt, params: SamplingParams, priority: int) -> Request:
        if self.engine.pooling is not None:
            raise UsageError(f'{self.model.name} was loaded with runner="pooling": use embed, or load it without')
        if not isinstance(params, SamplingParams):
            raise UsageError(f"sampling parameters are a graft.SamplingParams, not a {type(params).__name__}")
        if not isinstance(priority, int):
            raise UsageError(f"a priority is a whole number, not {priority!r}")
        ids = self.encode(prompt)
        check_fits(ids, params, self.model.context)
        if (params.stop or params.bad_words) and self.tokenizer is None:
            raise TokenizerMissing(self.model.name)
        if (why := mask_problem(params, self.vocabulary, self.engine.end_tokens)) is not None:
            raise UsageError(why)
        return self.engine.make(ids, params, priority=priority, mask=joined(self.masks(params)))

    def masks(self, params: SamplingParams) -> list[TokenMask]:
        """What says which tokens may come next, each at its beginning."""
        found: list[TokenMask] = []
        if params.grammar is not None:
            found.append(self.grammars.mask(params.grammar))
        if params.only is not None:
            found.append(OnlyThese(params.only, self.vocabulary))
        if params.bad_words:
            words = word_tokens(params.bad_words, partial(plain_tokens, self.tokenizer))
            found.append(WithoutWords(words, self.vocabulary))
        return found

    @property
    def vocabulary(self) -> int:
        return self.model.module.config.vocab_size

    @cached_property
    def grammars(self) -> Grammars:
        """Made with the first grammar, or before: reading a vocabulary takes a second, and no other thread runs."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None or not self.engine.end_tokens:
            lacking = "tokenizer in the `tokenizers` library" if backend is None else "end token"
            raise UsageError(f"grammar: {self.model.name} has no {lacking}, without which none can be kept to")
        return Grammars(backend.to_str(), self.vocabulary, self.engine.end_tokens)

    def attempt(self, make: Callable[[], Request]) -> Request | GraftError:
        try:
            return make()
        except GraftError as error:
            return error

    def encode(self, prompt: Prompt) -> list[int]:
        return encode(self.model, prompt)

    def output(self, request: Request | GraftError) -> Output:
        if isinstance(request, GraftError):
            return Output("", [], "error", error=request)
        return Output(
            request.read_text(),
            request.new_tokens,
            request.finish_reason or "abort",
            None if request.params.logprobs is None else request.logprobs,
            request.stop_reason,
            request.cached or 0,
            request.error,
            tuple(self.output(sibling) for sibling in request.siblings),
            request.prompt,
            None if request.params.prompt_logprobs is None else [None, *(request.leader or request).prompt_logprobs],
        )

    def embedding_output(self, request: Request | GraftError) -> EmbeddingOutput:
        if isinstance(request, GraftError):
            return EmbeddingOutput([], error=request)
        return EmbeddingOutput(request.embedding or [], request.prompt, request.cached or 0, request.error)


def some_can_run(made: list[Request | GraftError]) -> list[Request | GraftError]:
    """Raises the first error where none can."""
    errors = [entry for entry in made if isinstance(entry, GraftError)]
    if errors and len(errors) == len(made):
        raise errors[0]
    return made


def one_each(what: str, given: Any, prompts: int) -> list[Any]:
    each = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given] * prompts
    if len(each) != prompts:
        raise UsageError(f"prompts: {prompts}, {what}: {len(each)}; give one for all, or one each")
    return each
