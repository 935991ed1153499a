"""A model's files, weights and tokenizer."""

from __future__ import annotations

from graft.base.errors.base import GraftError


class CheckpointError(GraftError):
    """A model's files are missing, truncated or not what they should be."""


class PackingError(GraftError):
    """A weight that cannot be packed for the native kernels."""


class QuantizationError(GraftError):
    """A weight that cannot be quantized, or one that is not what it was quantized from."""


class TokenizerMissing(GraftError):
    def __init__(self, model: str) -> None:
        super().__init__(
            f"{model} has no tokenizer, so text cannot be turned into tokens; pass token ids instead"
            " (LLM.generate([[1, 2, 3]]), graft run --token-ids 1,2,3) or add tokenizer files to the folder"
        )
