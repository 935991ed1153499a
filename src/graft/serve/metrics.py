"""What /metrics tells, in Prometheus' text format: vLLM's names where they mean the same, `graft:` for the rest.

Names are never changed: dashboards and autoscalers read them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from graft.serve.wire import EngineLoad

SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
LONG = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


@dataclass
class Histogram:
    bounds: Sequence[float]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def lines(self, name: str, labels: str) -> Iterator[str]:
        running = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += count
            shown = "+Inf" if bound == float("inf") else f"{bound:g}"
            yield f'{name}_bucket{{{labels},le="{shown}"}} {running}'
        yield f"{name}_sum{{{labels}}} {self.total:g}"
        yield f"{name}_count{{{labels}}} {running}"


@dataclass
class Metrics:
    """Counts of this HTTP process; those of the engine come with every frame (EngineLoad)."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # answers, by the reason of their end
    refused: dict[str, int] = field(default_factory=dict)  # requests, by HTTP status
    restarts: int = 0
    slow_clients: int = 0
    first_token: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    between_tokens: Histogram = field(default_factory=lambda: Histogram(BETWEEN))
    per_token: Histogram = field(default_factory=lambda: Histogram(BETWEEN))
    whole: Histogram = field(default_factory=lambda: Histogram(LONG))
    queued: Histogram = field(default_factory=lambda: Histogram(LONG))  # until it was begun
    prefill: Histogram = field(default_factory=lambda: Histogram(LONG))  # from there to its first token
    decode: Histogram = field(default_factory=lambda: Histogram(LONG))  # from the first token to the last
    inference: Histogram = field(default_factory=lambda: Histogram(LONG))  # both
    prompt_length: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    answer_length: Histogram = field(default_factory=lambda: Histogram(TOKENS))

    def finish(self, reason: str) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1

    def refuse(self, status: int) -> None:
        self.refused[str(status)] = self.refused.get(str(status), 0) + 1

    def text(self, model: str, load: EngineLoad, lost_lines: int) -> str:
        labels = f'model_name="{escaped(model)}"'
        lines: list[str] = []
        for name, value in self.gauges(load):
            lines += [f"# TYPE {name} gauge", f"{name}{{{labels}}} {value:g}"]
        for name, value in self.counters(load, lost_lines):
            lines += [f"# TYPE {name} counter", f"{name}{{{labels}}} {value}"]
        for name, label, values in (
            ("vllm:request_success_total", "finished_reason", self.finished),
            ("graft:requests_refused_total", "status", self.refused),
        ):
            lines.append(f"# TYPE {name} counter")
            lines += [f'{name}{{{labels},{label}="{key}"}} {count}' for key, count in sorted(values.items())]
        for name, histogram in self.histograms():
            lines += [f"# TYPE {name} histogram", *histogram.lines(name, labels)]
        return "\n".join(lines) + "\n"

    def gauges(self, load: EngineLoad) -> Iterator[tuple[str, float]]:
        yield "vllm:num_requests_running", load.running
        yield "vllm:num_requests_waiting", load.waiting
        yield "vllm:kv_cache_usage_perc", load.used_blocks / load.blocks

    def counters(self, load: EngineLoad, lost_lines: int) -> Iterator[tuple[str, int]]:
        yield "vllm:prompt_tokens_total", self.prompt_tokens
        yield "vllm:generation_tokens_total", self.generation_tokens
        yield "vllm:prefix_cache_queries_total", load.prefix_queries
        yield "vllm:prefix_cache_hits_total", load.prefix_hits
        yield "vllm:external_prefix_cache_queries_total", load.host_hits + load.host_misses
        yield "vllm:external_prefix_cache_hits_total", load.host_hits
        yield "vllm:num_preemptions_total", load.preemptions
        yield "graft:engine_steps_total", load.steps
        yield "graft:engine_restarts_total", self.restarts
        yield "graft:slow_clients_total", self.slow_clients
        yield "graft:log_lines_lost_total", lost_lines

    def histograms(self) -> Iterator[tuple[str, Histogram]]:
        yield "vllm:time_to_first_token_seconds", self.first_token
        yield "vllm:inter_token_latency_seconds", self.between_tokens
        yield "vllm:request_time_per_output_token_seconds", self.per_token
        yield "vllm:e2e_request_latency_seconds", self.whole
        yield "vllm:request_queue_time_seconds", self.queued
        yield "vllm:request_prefill_time_seconds", self.prefill
        yield "vllm:request_decode_time_seconds", self.decode
        yield "vllm:request_inference_time_seconds", self.inference
        yield "vllm:request_prompt_tokens", self.prompt_length
        yield "vllm:request_generation_tokens", self.answer_length


def escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
