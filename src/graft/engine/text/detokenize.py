"""Text as it comes: whole characters only, however tokens cut them, and nothing from a stop string on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graft.engine.params import SamplingParams
from graft.engine.text.stops import StopFinder

UNFINISHED = "\ufffd"  # how tokenizers decode an unfinished character, and text that really holds this one
CONTEXT = 6  # tokens of the prompt that are decoded with the first new ones
CHARACTER = 4  # the most tokens that one character takes, as bytes of UTF-8
LONG = 8  # tokens without certain text, from where on only the last few are looked at


class Detokenizer:
    """Feeds on token ids and gives the text that is certain by now.

    A few tokens before the new ones are decoded with them, because a tokenizer may put a space between tokens that it
    leaves out at the start; text that ends inside a multi-byte character waits for the next token.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], skip_special_tokens: bool = True) -> None:
        self.tokenizer = tokenizer
        self.options = {"skip_special_tokens": skip_special_tokens}
        if getattr(tokenizer, "clean_up_tokenization_spaces", False):
            self.options["clean_up_tokenization_spaces"] = False  # it takes back spaces that were given already
        self.tokens = self.context(prompt)
        self.start = 0
        self.given = len(self.tokens)

    def context(self, prompt: Sequence[int]) -> list[int]:
        """The last tokens of the prompt: some with text, from the beginning of a character on."""
        size = CONTEXT
        while size < len(prompt) and not self.decode(list(prompt[-size:])):
            size *= 2
        tails = [list(prompt[-size - more :]) for more in range(CHARACTER)]
        return next((tail for tail in tails if not self.decode(tail).startswith(UNFINISHED)), tails[0])

    def feed(self, token: int) -> str:
        self.tokens.append(token)
        if len(self.tokens) - self.given > LONG and self.uncertain(self.decode(self.tokens[-LONG:])):
            return ""  # a long run of bytes or of skipped tokens is decoded once, at its end, not for each token
        new = self.rest()
        if self.uncertain(new):
            return ""
        self.start, self.given = self.given, len(self.tokens)
        return new

    def rest(self) -> str:
        """What is left when no more tokens come, an unfinished character included."""
        before = self.decode(self.tokens[self.start : self.given])
        now = self.decode(self.tokens[self.start :])
        if before.endswith(UNFINISHED) and not now.startswith(before):
            pairs = zip(before, now, strict=False)  # the prompt ended inside a character, which is finished now
            return now[next((i for i, (a, b) in enumerate(pairs) if a != b), len(now)) :]
        return now[len(before) :]

    def uncertain(self, text: str) -> bool:
        return not text or text.endswith(UNFINISHED)

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, **self.options)


class TextStream:
    """The text of a request, piece by piece, up to a stop string.

    Text that may be the beginning of a stop string is held back until that is decided. The first stop string to end
    in the new text counts, of those that end together the longest; one that ends before `min_tokens` tokens does not.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], params: SamplingParams) -> None:
        self.detokenizer = Detokenizer(tokenizer, prompt, params.skip_special_tokens)
        self.stops = StopFinder(tuple(params.stop or ()))
        self.include_stop = params.include_stop_str_in_output
        self.min_tokens = params.min_tokens
        self.fed = 0
        self.held = ""
        self.pieces: list[str] = []
        self.stopped: str | None = None
        self.ended = False

    @property
    def text(self) -> str:
        """All text given so far."""
        return "".join(self.pieces)

    def feed(self, token: int) -> str:
        """The text that is certain with this token."""
        if self.ended:
            return ""
        self.fed += 1
        return self.give(self.detokenizer.feed(token))

    def finish(self) -> str:
        """What is left when no more tokens come; after it, nothing more is given."""
        if self.ended:
            return ""
        last = self.give(self.detokenizer.rest())
        self.ended = True
        left, self.held = self.held, ""
        self.pieces.append(left)
        return last + left

    def give(self, piece: str) -> str:
        found = self.stops.feed(piece, self.fed >= self.min_tokens)
        text = self.held + piece
        if found is not None:
            end, self.stopped = found
            text = text[: len(self.held) + end - (0 if self.include_stop else len(self.stopped))]
            certain, self.ended = len(text), True
        else:
            certain = len(text) - self.stops.open
        self.held = text[certain:]
        self.pieces.append(text[:certain])
        return text[:certain]
