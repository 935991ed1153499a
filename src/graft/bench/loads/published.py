"""Figures that others publish for loads that `graft bench --throughput` runs, with their source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """Output tokens a second of one load."""

    source: str
    conditions: str
    tokens_per_s: dict[str, int]  # ISL/OSL →


TENSORRT_LLM = Published(
    "TensorRT-LLM 1.0, docs/source/performance/perf-overview.md",
    "Llama-3.1-8B in FP8 with an FP8 key-value cache, one H200, all requests at once",
    {
        "128/128": 27_911,
        "128/2048": 26_221,
        "128/4096": 18_027,
        "500/2000": 20_770,
        "1000/1000": 17_744,
        "1000/2000": 16_828,
        "2048/128": 3_538,
        "2048/2048": 12_194,
        "5000/500": 3_902,
        "20000/2000": 1_804,
    },
)
PRESETS = {"trtllm": TENSORRT_LLM}
