"""Text as it comes: whole characters only, however tokens cut them."""

from __future__ import annotations

from typing import Any


class Detokenizer:
    """Feeds on token ids and gives the text that is certain by now.

    A few tokens before the new ones are decoded with them, because a tokenizer may put a space between tokens that it
    leaves out at the start; text that ends inside a multi-byte character waits for the next token.
    """

    def __init__(self, tokenizer: Any, prompt: list[int]) -> None:
        self.tokenizer = tokenizer
        self.tokens = list(prompt[-6:])
        self.start = 0
        self.given = len(self.tokens)

    def feed(self, token: int) -> str:
        self.tokens.append(token)
        before = self.decode(self.tokens[self.start : self.given])
        now = self.decode(self.tokens[self.start :])
        if now.endswith("\ufffd") or len(now) <= len(before):
            return ""
        self.start, self.given = self.given, len(self.tokens)
        return now[len(before) :]

    def rest(self) -> str:
        """What is left when no more tokens come, an unfinished character included."""
        before = self.decode(self.tokens[self.start : self.given])
        return self.decode(self.tokens[self.start :])[len(before) :]

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)
