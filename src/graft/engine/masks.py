"""Which tokens may come next: what a mask of a request can do, and those that need no grammar.

Nothing here needs torch, so that a server's HTTP process can say what is wrong with a request before it is sent on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np

from graft.base.errors import UsageError
from graft.engine.params import SamplingParams

Words = Sequence[tuple[int, ...]]


class TokenMask(Protocol):
    """Where an answer stands: `allowed` says what may come next, `accept` takes note of what came."""

    def allowed(self) -> np.ndarray:
        """[vocab] bool, which nobody may write to."""
        ...

    def accept(self, token: int) -> str | None:
        """Why the answer cannot go on, if it cannot."""
        ...

    def copy(self) -> TokenMask:
        """For another sample, from here on."""
        ...


class OnlyThese:
    """allowed_token_ids: the same tokens at every place."""

    def __init__(self, tokens: Sequence[int], vocabulary: int) -> None:
        self.may = np.zeros(vocabulary, dtype=bool)
        self.may[list(tokens)] = True

    def allowed(self) -> np.ndarray:
        return self.may

    def accept(self, token: int) -> str | None:  # noqa: ARG002
        return None

    def copy(self) -> OnlyThese:
        return self


class WithoutWords:
    """bad_words: the last token of a word is barred where the tokens before it have just come."""

    def __init__(self, words: Words, vocabulary: int) -> None:
        self.vocabulary, self.words = vocabulary, [word for word in words if max(word) < vocabulary]
        self.longest = max(map(len, self.words), default=1) - 1
        self.came: list[int] = []  # the last new tokens, as many as a word has before its last

    def allowed(self) -> np.ndarray:
        may = np.ones(self.vocabulary, dtype=bool)
        came = tuple(self.came)
        for *before, last in self.words:
            if came[len(came) - len(before) :] == tuple(before):
                may[last] = False
        return may

    def accept(self, token: int) -> str | None:
        self.came = [*self.came, token][-self.longest :] if self.longest else []
        return None

    def copy(self) -> WithoutWords:
        made = WithoutWords(self.words, self.vocabulary)
        made.came = list(self.came)
        return made


class AllOf:
    """What each of several masks allows."""

    def __init__(self, masks: Sequence[TokenMask]) -> None:
        self.masks = masks

    def allowed(self) -> np.ndarray:
        return np.logical_and.reduce([mask.allowed() for mask in self.masks])

    def accept(self, token: int) -> str | None:
        found = [mask.accept(token) for mask in self.masks]
        return next((why for why in found if why), None)

    def copy(self) -> AllOf:
        return AllOf([mask.copy() for mask in self.masks])


def joined(masks: Sequence[TokenMask]) -> TokenMask | None:
    """One for all; None where there is none."""
    return masks[0] if len(masks) == 1 else AllOf(masks) if masks else None


def word_tokens(words: Sequence[str], encode: Callable[[str], Sequence[int]]) -> list[tuple[int, ...]]:
    """bad_words as tokens: each as it is written at the beginning of a text, and behind a blank."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip() or word
        for text in (bare, f" {bare}"):
            tokens = tuple(encode(text))
            if not tokens:
                raise UsageError(f"bad_words: {word!r:.60} has no tokens, so it cannot be barred; leave it out")
            found[tokens] = None
    return list(found)


def mask_problem(params: SamplingParams, vocabulary: int, ends: Collection[int]) -> str | None:
    """What is wrong with its tokens for a model of so many, which end an answer. Begins with the field."""
    for name, tokens in (("logit_bias", [token for token, _ in params.biases]), ("allowed_token_ids", params.only)):
        strange = next((token for token in tokens or () if token >= vocabulary), None)
        if strange is not None:
            return f"{name}: token id {strange} is outside the vocabulary of {vocabulary}"
    if not params.min_tokens:
        return None
    stops = {*(params.stop_token_ids or ()), *ends}
    if params.only is not None:
        left = set(params.only) - stops
        return None if left else "min_tokens: allowed_token_ids has no token that would not end it"
    left = vocabulary - len({token for token in stops if token < vocabulary})
    return None if left else "min_tokens: stop_token_ids leaves no token that would not end it"
