"""What became of each size of a function that is compiled in pieces, as data that JSON holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from graft.stages.story import Recompilation, StoryEnd


@dataclass(frozen=True)
class PieceCompiled:
    """how: compiled, or out of the cache: an equal piece was compiled for this size before."""

    size: int
    piece: int
    how: str
    seconds: float
    kernels: int
    captured: bool
    reason: str = ""  # why no CUDA graph


@dataclass(frozen=True)
class BucketCall:
    """One call: whether Dynamo traced for it, what was compiled for it, and how many pieces had been before."""

    size: int
    seconds: float
    traced: bool
    compiled: tuple[PieceCompiled, ...]
    reused: int


@dataclass(frozen=True)
class BucketStory:
    """calls: one for each size, then all once more. pieces: calls in each. left: ops that stay as they are."""

    target: str
    torch: str
    device: str
    split_at: tuple[str, ...]
    pieces: tuple[int, ...] = ()
    left: tuple[str, ...] = ()
    calls: tuple[BucketCall, ...] = ()
    recompilations: tuple[Recompilation, ...] = ()
    end: StoryEnd | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
