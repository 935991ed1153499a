"""How long kernels of graft::fused_linear take on a GPU: alone, and as parts of a decode step."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graft.base.errors import OutOfMemory
from graft.base.timers import graph_seconds
from graft.bench.tune.results import Result, StepSample, step_sample, weight_bytes
from graft.engine.engine import Engine
from graft.engine.kv.tensors import bytes_per_block
from graft.engine.llm import LLM
from graft.engine.options import EngineOptions
from graft.engine.params import SamplingParams
from graft.engine.setup.build import build_engine
from graft.ops.fused_linear.kinds import How, LinearShape
from graft.ops.fused_linear.triton import LinearCall, run_as
from graft.ops.launch import launch_failures
from graft.weights.quantize import abstract

COLD = 600 << 20  # bytes of weights in turn, several times the 60 MB of L2 of an H200
FEWEST_COPIES, MOST_COPIES = 3, 24
THREADS = 8  # that compile
STEP_REPEATS = 3
PROMPT, NEW = 8, 48  # tokens: 128 prompts fit into one step, and 47 steps only decode

FAILURES = launch_failures()  # what a configuration that the device cannot run ends with


@dataclass(frozen=True)
class KernelTimer:
    """Microseconds of a call on weights that are not in the cache, as one of many in a CUDA graph."""

    device: torch.device

    def __call__(self, shape: LinearShape, tokens: int, ways: Sequence[How]) -> list[Result]:
        try:
            calls = make_calls(shape, tokens, self.device)
        except torch.OutOfMemoryError as error:
            return [reason(error)] * len(ways)
        with ThreadPoolExecutor(THREADS) as pool:
            problems = list(pool.map(lambda how: self.compile(calls[0], how), ways))
        torch.cuda.synchronize(self.device)
        return [problem or self.time(calls, how) for how, problem in zip(ways, problems, strict=True)]

    def compile(self, call: LinearCall, how: How) -> str | None:
        """Runs it once; why that failed, or None."""
        try:
            with torch.cuda.device(self.device):
                run_as(call, how)
        except FAILURES as error:
            return reason(error)
        return None

    def time(self, calls: Sequence[LinearCall], how: How) -> Result:
        try:
            return graph_seconds(lambda: [run_as(call, how) for call in calls], self.device) / len(calls) * 1e6
        except FAILURES as error:
            return reason(error)


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def make_calls(shape: LinearShape, tokens: int, device: torch.device) -> list[LinearCall]:
    """As many calls on weights of their own as leave nothing of the first in the cache. A GEMM without norm and
    gate adds a residual, as those of a decoder do."""
    copies = max(FEWEST_COPIES, min(MOST_COPIES, -(-COLD // weight_bytes(shape))))
    x = torch.randn(tokens, shape.k, device=device, dtype=torch.bfloat16)
    folded = shape.norm and shape.format != "plain"  # the norm's weight is in a quantized one
    norm = torch.randn(shape.k, device=device, dtype=torch.bfloat16) if shape.norm and not folded else None
    after = not (shape.gated or shape.norm)
    residual = torch.randn(tokens, shape.n, device=device, dtype=torch.bfloat16) if after else None
    activation = "silu" if shape.gated else "none"
    calls = []
    for _ in range(copies):
        weight, scale = make_weight(shape, device)
        calls.append(
            LinearCall(x, weight, None, scale, norm, 1e-5, activation=activation, residual=residual, normed=folded)
        )
    return calls


def make_weight(shape: LinearShape, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Random weights of about k^-1/2, and their scales."""
    rows, k = 2 * shape.n if shape.gated else shape.n, shape.k
    if shape.format == "plain":
        return torch.randn(rows, k, device=device, dtype=torch.bfloat16) * k**-0.5, None
    packed, scales = abstract(torch.empty(rows, k, dtype=torch.bfloat16, device="meta"), shape.format)
    if shape.format == "int4":
        words = torch.randint(-(2**15), 2**15, packed.shape, device=device, dtype=packed.dtype)
        return words, torch.rand(scales.shape, device=device, dtype=scales.dtype) * k**-0.5
    q = torch.randint(-127, 128, packed.shape, device=device, dtype=torch.int8)
    scale = torch.rand(rows, device=device) * k**-0.5
    if shape.format == "int8":
        return q, scale / 64
    return (q.to(torch.bfloat16) / 8).to(torch.float8_e4m3fn), scale / 8


@contextmanager
def noted_steps(engine: Engine) -> Iterator[list[float]]:
    """The seconds of each step within it that was a replay of a capture, as the engine counts them."""
    noted: list[float] = []
    count = engine.count

    def counting(plan: Any, grown: Any, seconds: float, decoding: bool = False) -> None:
        if decoding:
            noted.append(seconds)
        count(plan, grown, seconds, decoding)

    engine.count = counting
    try:
        yield noted
    finally:
        del engine.count


@dataclass(frozen=True)
class DecodeTimer:
    """Microseconds of a decode step of a model, captured anew by the kernels that the current table names."""

    llm: LLM

    def __call__(self, tokens: int) -> StepSample | str:
        try:
            other = self.rebuilt(tokens)
            params = SamplingParams(max_tokens=NEW, ignore_eos=True)
            prompts = [[1 + (row + i) % 7 for i in range(PROMPT)] for row in range(tokens)]
            times, steps = [], []
            for repeat in range(1 + STEP_REPEATS):  # the first warms up
                with noted_steps(other.engine) as noted:
                    outputs, stats = other.generate(prompts, params), other.stats
                steps += noted if repeat else []
                failed = next((output.error for output in outputs if output.error is not None), None)
                if failed is not None:
                    return reason(failed)
                if not stats.replayed_steps:
                    return f"no decode step was a capture: {'; '.join(other.engine.notes)}"
                times.append(stats.decode_seconds / max(1, stats.decode_tokens) * tokens * 1e6)
            return step_sample(min(times[1:]), steps)
        except (OutOfMemory, *FAILURES) as error:
            return reason(error)

    def rebuilt(self, tokens: int) -> LLM:
        """The same lowered graph under an engine with room for this and no more."""
        llm = self.llm
        size = llm.engine.manager.block_size
        layers = llm.cache.layers
        blocks = tokens * (1 + -(-(PROMPT + NEW) // size))
        options = EngineOptions(
            kv_cache_memory=blocks * bytes_per_block(layers, size),
            max_num_seqs=tokens,
            enable_prefix_caching=False,
            cudagraph_capture_sizes=(tokens,),
        )
        other = copy.copy(llm)
        other.engine, _ = build_engine(
            llm.engine.graph,
            llm.model,
            layers,
            size,
            options,
            llm.device,
            content=llm.cache.content,
            states=llm.cache.states,
        )
        return other
