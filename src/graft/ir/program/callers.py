"""Whose code called, in the words of an error."""

from __future__ import annotations

from pathlib import Path
from types import FrameType


def line_of(frame: FrameType | None) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else "no Python line"


def is_torch(frame: FrameType | None) -> bool:
    """Dynamo and checkpointing keep the state of generators and put it back, which changes nothing.

    Helpers of torch.testing seed on behalf of their callers.
    """
    name = str(frame.f_globals.get("__name__")) if frame is not None else ""
    return name.partition(".")[0] == "torch" and not name.startswith("torch.testing.")
