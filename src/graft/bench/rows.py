"""The results of a benchmark: a row for each engine at each batch size and prompt."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One engine in one cell: medians over the repeats. A failure says why and leaves the rest empty.

    setup_seconds: its first calls, compilation included; in none of the other times.
    build_seconds: from a loaded model until the first calls were through. graft is built once, before them, and that
    time is part of each of its rows; a baseline is compiled anew for each row.
    same_tokens: the share of the first calls' tokens that are graft's.
    """

    engine: str
    batch: int
    prompt: int = 0
    setup_seconds: float = 0.0
    build_seconds: float = 0.0
    first_token_ms: float | None = None  # until every prompt of the batch has its first token
    prefill_tokens_per_s: float | None = None
    prefill_tflops: float | None = None  # TFLOP/s of the prompts' GEMMs
    prefill_percent: float | None = None  # of the measured rate of a large GEMM
    token_ms: float | None = None  # a decode step: one more token for each
    decode_tokens_per_s: float | None = None
    gb_per_s: float | None = None
    roofline_percent: float | None = None  # of the measured read bandwidth
    same_tokens: float | None = None
    failed: str = ""


@dataclass(frozen=True)
class Bench:
    setup: dict[str, Any]
    rows: tuple[Row, ...] = ()
    interrupted: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def ratio(self, row: Row) -> float | None:
        """How many times as fast as this row graft decodes."""
        same = (r for r in self.rows if r.engine == "graft" and (r.batch, r.prompt) == (row.batch, row.prompt))
        ours = next(same, None)
        if ours is None or not ours.decode_tokens_per_s or not row.decode_tokens_per_s:
            return None
        return ours.decode_tokens_per_s / row.decode_tokens_per_s
