"""How a request wants its tokens chosen. Names and meanings are vLLM's; the default is greedy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graft.base.errors import UsageError

LARGEST = sys.float_info.max
MOST_STOP_TOKENS = 1024  # every token is compared with each, in the step that all requests share
MOST_STOPS = 16  # every character is compared with every stop string
MOST_LOGPROBS = 20
MOST_BIASES = 1024  # tokens
MOST_BAD_WORDS = 1024  # each is compared with what came, in every step
MOST_BAD_TEXT = 1 << 16  # characters of all of them, which are made tokens of, twice

# field: (kind, what is allowed, the same in words). Comparisons alone, so that NaN fails each of them.
Rule = tuple[str, Callable[[Any], bool], str]
RULES: dict[str, Rule] = {
    "n": ("whole number", lambda v: v >= 1, "at least 1"),
    "temperature": ("number", lambda v: 0 <= v <= LARGEST, "0 or more and finite (0 is greedy)"),
    "top_k": ("whole number", lambda v: v >= -1, "at least 1, or 0 or -1 for off"),
    "top_p": ("number", lambda v: 0 < v <= 1, "above 0 and at most 1 (1 is off)"),
    "min_p": ("number", lambda v: 0 <= v <= 1, "from 0 to 1 (0 is off)"),
    "repetition_penalty": ("number", lambda v: 1e-6 <= v <= 1e6, "between 1e-6 and 1e6 (1 is off)"),
    "presence_penalty": ("number", lambda v: -2 <= v <= 2, "from -2 to 2 (0 is off)"),
    "frequency_penalty": ("number", lambda v: -2 <= v <= 2, "from -2 to 2 (0 is off)"),
    "seed": ("whole number or None", lambda v: -(2**63) <= v < 2**64, "a whole number that fits into 64 bits"),
    "logprobs": (
        "whole number or None",
        lambda v: 0 <= v <= MOST_LOGPROBS,
        f"from 0 to {MOST_LOGPROBS}, or None for off",
    ),
    "prompt_logprobs": (
        "whole number or None",
        lambda v: 0 <= v <= MOST_LOGPROBS,
        f"from 0 to {MOST_LOGPROBS}, or None for off",
    ),
    "max_tokens": ("whole number", lambda v: v >= 1, "at least 1"),
    "min_tokens": ("whole number", lambda v: v >= 0, "0 or more"),
    "include_stop_str_in_output": ("bool", lambda v: v in (True, False), "True or False"),
    "ignore_eos": ("bool", lambda v: v in (True, False), "True or False"),
    "skip_special_tokens": ("bool", lambda v: v in (True, False), "True or False"),
}
KINDS: dict[str, tuple[type, ...]] = {
    "whole number": (int,),
    "whole number or None": (int, type(None)),
    "number": (int, float),
    "bool": (bool,),
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop.

    temperature=0 is greedy, where top_k, top_p and min_p change nothing. Repetition counts the prompt and the new
    tokens, presence and frequency the new ones alone. `seed` makes sampling repeatable. `stop` and `stop_token_ids`
    are tuples once made. logit_bias: token → what is added to its logit, from -100 (never) to 100; pairs once made.
    grammar: what the text must keep to, as engine/grammar.py makes it of a JSON schema (needs llguidance).
    allowed_token_ids: no others are chosen, end tokens neither. bad_words: texts whose last token is not chosen where
    the rest of them has just been, as they are written at the beginning of a text or behind a blank.
    prompt_logprobs: as logprobs, of the prompt's own tokens; its prompt is computed, not taken from the cache.
    """

    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = ()
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = ()
    skip_special_tokens: bool = True
    grammar: str | None = None

    def __post_init__(self) -> None:
        for name, rule in RULES.items():
            check(name, getattr(self, name), rule)
        object.__setattr__(self, "stop", stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", stop_tokens(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", bias_pairs(self.logit_bias))
        object.__setattr__(self, "allowed_token_ids", allowed_tokens(self.allowed_token_ids))
        object.__setattr__(self, "bad_words", bad_words(self.bad_words))
        if self.min_tokens > self.max_tokens:
            raise wrong("min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}")
        self.check_grammar()
        if self.n > 1 and self.greedy:
            raise wrong("n", self.n, "1 when greedy (temperature=0), where all answers would be the same")

    def check_grammar(self) -> None:
        if self.grammar is None:
            return
        if not isinstance(self.grammar, str) or not self.grammar:
            raise wrong("grammar", self.grammar, "a text, as json_grammar(schema) gives it")
        for name in ("ignore_eos", "min_tokens"):
            if getattr(self, name):
                raise UsageError(f"{name} contradicts a grammar, which says where the text ends; leave it out")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        return tuple(self.logit_bias or ())  # pyrefly: ignore  # pairs, since it was made

    @property
    def only(self) -> tuple[int, ...] | None:
        return self.allowed_token_ids  # pyrefly: ignore  # a tuple, since it was made

    @property
    def masked(self) -> bool:
        """A mask says which tokens may come next."""
        return self.grammar is not None or self.allowed_token_ids is not None or bool(self.bad_words)

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def check(name: str, value: object, rule: Rule) -> None:
    kind, allowed, words = rule
    if not isinstance(value, KINDS[kind]) or (isinstance(value, bool) and kind != "bool"):
        raise wrong(name, value, f"{words}, a {kind}" if kind != "bool" else words)
    if value is not None and not allowed(value):
        raise wrong(name, value, words)


def stop_strings(stop: object) -> tuple[str, ...]:
    texts = items("stop", (stop,) if isinstance(stop, str) else stop, "a string or a list of strings")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise wrong("stop", text, "strings of at least one character")
    if len(texts) > MOST_STOPS:
        raise UsageError(f"stop must be at most {MOST_STOPS} strings, but is {len(texts)} of them")
    return texts


def stop_tokens(ids: object) -> tuple[int, ...]:
    numbers = items("stop_token_ids", ids, "a list of token ids")
    if len(numbers) > MOST_STOP_TOKENS:
        raise UsageError(f"stop_token_ids must be at most {MOST_STOP_TOKENS} ids, but are {len(numbers)}")
    return token_ids("stop_token_ids", numbers)


def token_ids(name: str, numbers: tuple[Any, ...]) -> tuple[int, ...]:
    if set(map(type, numbers)) <= {int} and min(numbers, default=0) >= 0:
        return numbers  # a vocabulary's worth in a few milliseconds
    for number in numbers:
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise wrong(name, number, "token ids, whole numbers of 0 or more")
    return tuple(map(int, numbers))


def allowed_tokens(ids: object) -> tuple[int, ...] | None:
    if ids is None:
        return None
    numbers = token_ids("allowed_token_ids", items("allowed_token_ids", ids, "a list of token ids"))
    if not numbers:
        raise UsageError("allowed_token_ids must have a token id at least; leave it out to allow all")
    return tuple(sorted(set(numbers)))


def bad_words(given: object) -> tuple[str, ...]:
    words = items("bad_words", given, "a list of strings")
    if len(words) > MOST_BAD_WORDS:
        raise UsageError(f"bad_words must be at most {MOST_BAD_WORDS} strings, but is {len(words)} of them")
    for word in words:
        if not isinstance(word, str) or not word:
            raise wrong("bad_words", word, "strings of at least one character")
    if sum(map(len, words)) > MOST_BAD_TEXT:
        raise UsageError(f"bad_words must have at most {MOST_BAD_TEXT} characters together")
    return words


def bias_pairs(given: object) -> tuple[tuple[int, float], ...]:
    if isinstance(given, Mapping):
        check_biased(len(given))
        given = tuple(given.items())
    pairs = items("logit_bias", given, "token ids and numbers, such as {50256: -100}")
    check_biased(len(pairs))
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise wrong("logit_bias", pair, "token ids and numbers, such as {50256: -100}")
        token, bias = pair
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise wrong("logit_bias", token, "of token ids, whole numbers of 0 or more")
        check("logit_bias", bias, ("number", lambda v: -100 <= v <= 100, "from -100 to 100"))
    return tuple(dict(pairs).items())


def check_biased(tokens: int) -> None:
    """Before any of them is looked at: a body may have hundreds of thousands."""
    if tokens > MOST_BIASES:
        raise UsageError(f"logit_bias must be of at most {MOST_BIASES} tokens, but is of {tokens}")


def items(name: str, value: object, words: str) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise wrong(name, value, words)
    return tuple(value)


def wrong(name: str, value: object, allowed: str) -> UsageError:
    shown = value if isinstance(value, (int, float)) else f"{value!r} ({type(value).__name__})"
    return UsageError(f"{name} must be {allowed}, but is {shown}")
