"""Whether two engines say the same: of every token of a prompt, and of every decode step behind prompts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

from graft.engine.core import Output
from graft.engine.llm import LLM
from graft.engine.logprobs import Logprob
from graft.engine.params import MOST_LOGPROBS, SamplingParams
from graft.engine.setup.self_check import tolerance

NEW = 6  # tokens behind a prompt
FORCED = 100.0  # on the logit of a token: it is chosen, and what is told of the others is before that
Likely = Mapping[int, Logprob]


def differences(before: LLM, after: LLM, prompt: int) -> tuple[str, str]:
    """What differs, or '' and how near they are. Tokens are given to both alike, decoded ones by a bias: what one
    engine chooses by a hair is no difference, and what it computes from it is none either."""
    limit = 2 * tolerance(before.model.module.dtype)
    worst, count = 0.0, 0
    for where, mine, wanted in pairs(before, after, prompt):
        apart, known = distance(mine, wanted)
        if not apart <= limit or known < len(wanted) // 2:
            return f"log probabilities of {where} differ by {apart:.1e} of the largest, {limit:.1e} is allowed", ""
        worst, count = max(worst, apart), count + 1
    return "", f"{count} tokens of prompts and decode steps, log probabilities to {worst:.1e} (allowed {limit:.1e})"


def pairs(before: LLM, after: LLM, prompt: int) -> Iterator[tuple[str, Likely, Likely]]:
    """The likeliest tokens of both engines after every token of a prompt; in decode steps of one request, of one
    whose prompt is a single token, and of both at once."""
    source = random.Random("autofuse")
    vocabulary = before.model.module.config.get_text_config().vocab_size

    def tokens(count: int) -> list[int]:
        return [source.randrange(vocabulary) for _ in range(count)]

    asked = SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=MOST_LOGPROBS)
    whole = tokens(prompt)
    one, other = (llm.generate([whole], asked)[0].prompt_logprobs or () for llm in (after, before))
    for at, (mine, wanted) in enumerate(zip(one, other, strict=True)):
        if mine is not None and wanted is not None:
            yield f"token {at} of a prompt", mine, wanted
    for name, prompts in (
        ("alone", [tokens(prompt)]),
        ("behind a single token", [tokens(1)]),
        ("of two requests", [tokens(prompt), tokens(max(1, prompt // 2))]),
    ):
        forced = [forcing(token) for token in tokens(len(prompts))]
        yield from decoded(name, *(llm.generate(prompts, forced) for llm in (after, before)))


def forcing(token: int) -> SamplingParams:
    return SamplingParams(max_tokens=NEW, ignore_eos=True, logprobs=MOST_LOGPROBS, logit_bias={token: FORCED})


def decoded(name: str, one: Sequence[Output], other: Sequence[Output]) -> Iterator[tuple[str, Likely, Likely]]:
    for mine, wanted in zip(one, other, strict=True):
        steps = zip(mine.logprobs or (), wanted.logprobs or (), strict=True)
        for step, both in enumerate(steps):
            yield f"decode step {step} {name}", *both


def distance(mine: Likely, wanted: Likely) -> tuple[float, int]:
    """The largest difference of tokens that both name, of the largest; and how many they are."""
    scale = max(1.0, *(abs(one.logprob) for one in wanted.values()))
    both = mine.keys() & wanted.keys()
    # `not <=` of the caller finds a NaN; max would lose it
    apart = [abs(mine[token].logprob - wanted[token].logprob) / scale for token in both]
    odd = next((value for value in apart if value != value), None)
    return (max(apart, default=1.0) if odd is None else odd), len(both)
