"""Capturing, matching, rewriting and checking graphs."""

from __future__ import annotations

from graft.base.errors.base import GraftError


class CaptureError(GraftError):
    """torch.export could not capture the module."""


class UnsupportedAttention(CaptureError):
    def __init__(self, module: str, problem: str) -> None:
        super().__init__(
            f"attention module {module}: {problem}; graft will not drop it silently."
            " Extend capture/attention.py and the schema of graft::attention, or capture without it"
        )


class UnsupportedState(CaptureError):
    """What a decoder keeps from step to step would be lost; the message names the layers and their state."""


class PatternError(GraftError):
    """A pattern or replacement function that cannot be used as one."""


class VerificationError(GraftError):
    """A rewritten graph broke an invariant."""


class DecodeMismatch(VerificationError):
    """Decode steps do not compute what one pass over the same tokens computes; the first layer is named."""


class NumericCheckError(VerificationError):
    """A replacement does not compute what it replaced, or that could not be tried out."""


class StreamOrderError(VerificationError):
    """Two calls on different streams touch one memory, and nothing makes the second wait for the first."""

    def __init__(self, first: str, second: str, problem: str, fix: str) -> None:
        super().__init__(f"{second} does not wait for {first}: {problem}; {fix}")


class TransformError(GraftError):
    def __init__(self, transform: str, detail: str) -> None:
        super().__init__(
            f"transform {transform} failed and was rolled back: {detail}."
            f" Set transforms.{transform}.on_error=skip to go on without it, or transforms.{transform}.enabled=false"
        )


class ForeignPassError(GraftError):
    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"the pass {name} cannot run as a transform: {problem}")


class ShapesUnknown(GraftError):
    def __init__(self, where: str) -> None:
        super().__init__(
            f"{where} has no recorded shape, so what it moves cannot be counted; capture the model with graft"
            " (graft discover MODEL), or dump it again (graft dump MODEL -o DIR)"
        )


class LiftError(GraftError):
    """A buffer cannot be made an input of the graph, or put back."""
