"""One point of the list: what was looked at, how it came out, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["pass", "fail", "skip"]


@dataclass(frozen=True)
class CheckLine:
    check: str
    verdict: Verdict
    reason: str
