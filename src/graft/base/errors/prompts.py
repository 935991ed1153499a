"""What a request asks of a model that it cannot do."""

from __future__ import annotations

from graft.base.errors.base import GraftError, UsageError


class PromptTooLong(UsageError):
    def __init__(self, tokens: int, new_tokens: int, context: int) -> None:
        asked = f" and {new_tokens} new ones are asked for" if new_tokens else ""
        remedy = "shorten the prompt or lower max_tokens" if new_tokens else "shorten it"
        super().__init__(f"the prompt has {tokens} tokens{asked}, but the model's context is {context}; {remedy}")


class EmptyPrompt(UsageError):
    def __init__(self) -> None:
        super().__init__("a prompt has no tokens; give at least one (a tokenizer may add none to an empty text)")


class NotText(UsageError):
    def __init__(self, detail: str) -> None:
        super().__init__(f"the prompt is not valid text: {detail}; decode it as UTF-8 first, or pass token ids")


class LogitsError(GraftError):
    def __init__(self) -> None:
        super().__init__(
            "the logits of a request have no finite largest value (NaN, infinity, or every token barred), so no token"
            " can be chosen; check the weights, try float32, weaken the penalties, or let bad_words,"
            " allowed_token_ids and the grammar leave a token"
        )


class EmbeddingNotFinite(GraftError):
    def __init__(self) -> None:
        super().__init__(
            "the hidden states of a prompt are not finite (NaN or infinity), so it has no embedding; check the"
            " weights, or try float32"
        )


class BadIndex(UsageError):
    def __init__(self, node: str, path: str) -> None:
        location = f"%{node}" + (f" ({path})" if path else "")
        super().__init__(f"{location} was given an index outside of its table: a token or position the model lacks")
