"""Decoding on several ranks: what was measured on a CPU, and what is predicted for GPUs.

    python -m benchmarks.tensor_parallel qwen2.5-0.5b --ranks 1,2  # ms a step, MB a process, share of communication
    python -m benchmarks.tensor_parallel qwen2.5-0.5b --turns      # 2 ranks and 1 in turns, as many threads in all
    python -m benchmarks.tensor_parallel --norms                   # an exchange, and the residual and norm behind it
    python -m benchmarks.tensor_parallel --predict                 # the tables of docs/scale.md

The prediction is a formula, not a measurement:

    step(N) = weights / (N · rate) + batch · context · kv / (min(N, kv_heads) · rate) + 2 · layers · exchange(N)
    exchange(N) = latency + 2 (N - 1) / N · batch · hidden · 2 bytes / link

and of sequence parallelism, which has a reduce-scatter, a norm of its share of the rows and an all-gather in place of
an all-reduce and a norm of all rows (the same bytes over the link, 4 values of each row read or written by the norm):

    saved(N) = 2 · layers · (4 (N - 1) / N · tokens · hidden · 2 bytes / rate - latency)
    prompt(N) = 2 · parameters · tokens / (N · flops) + 2 · layers · exchange(N), without attention's scores

rate: bytes a second that a decode step of one GPU reads, from the measured step of Llama-3.1-8B in bfloat16
(benchmarks/RESULTS.md: 270 tokens/s). link and latency: NVLink 4 as published (450 GB/s each way), and what an
all-reduce of a few KB takes at best, which is assumed. flops: two thirds of 990 · 10^12, as published (assumed).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEASURED = 270  # tokens a second, Llama-3.1-8B, bfloat16, batch 1, one H200
LINK = 450e9  # bytes a second each way, NVLink 4
LATENCY = 12e-6  # seconds of an all-reduce of a few KB inside a CUDA graph (assumed)
CONTEXT = 1024
FLOPS = 660e12  # multiplications and additions a second of large GEMMs in bfloat16 (assumed)


@dataclass(frozen=True)
class Shape:
    """weights: bytes that a step reads; the embedding is looked up, not read."""

    name: str
    weights: float
    layers: int
    hidden: int
    kv_heads: int
    head_dim: int

    @property
    def kv(self) -> int:
        """Bytes of keys and values of a token."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


SHAPES = (
    Shape("Llama-3.1-8B", 2 * 7.505e9, 32, 4096, 8, 128),
    Shape("Llama-3.1-70B", 2 * 69.5e9, 80, 8192, 8, 128),
)
RATE = SHAPES[0].weights * MEASURED  # 4.05 TB/s of 4.8


def exchange(world: int, size: float) -> float:
    return 0.0 if world == 1 else LATENCY + 2 * (world - 1) / world * size / LINK


def step(shape: Shape, world: int, batch: int) -> tuple[float, float]:
    """Seconds of a decode step, and of them in exchanges."""
    reads = shape.weights / world + batch * CONTEXT * shape.kv / min(world, shape.kv_heads)
    waits = 2 * shape.layers * exchange(world, batch * shape.hidden * 2)
    return reads / RATE + waits, waits


def predict() -> str:
    lines = ["| predicted | batch | 1 GPU | 2 | 4 | 8 |", "|---|---|---|---|---|---|"]
    for shape in SHAPES:
        for batch in (1, 64):
            cells = []
            for world in (1, 2, 4, 8):
                if shape.weights / world > 120e9:
                    cells.append("does not fit")
                    continue
                seconds, waits = step(shape, world, batch)
                cells.append(
                    f"{1000 * seconds:.2f} ms, {batch / seconds:,.0f} tok/s ({waits / seconds:.0%} exchanges)"
                )
            lines.append(f"| {shape.name} | {batch} | {' | '.join(cells)} |")
    return "\n".join(lines)


def sequence(shape: Shape, world: int, tokens: int) -> tuple[float, float]:
    """Seconds that sequence parallelism saves in a step of prompts, and of the step without it."""
    row = shape.hidden * 2
    saved = 2 * shape.layers * (4 * (world - 1) / world * tokens * row / RATE - LATENCY)
    return saved, shape.weights * tokens / (world * FLOPS) + 2 * shape.layers * exchange(world, tokens * row)


def predict_sequence() -> str:
    lines = ["| predicted | tokens of prompts | 2 GPUs | 4 | 8 |", "|---|---|---|---|---|"]
    for shape in SHAPES:
        for tokens in (512, 2048, 8192):
            cells = []
            for world in (2, 4, 8):
                saved, whole = sequence(shape, world, tokens)
                cells.append(f"{1000 * saved:+.2f} of {1000 * whole:.1f} ms ({saved / whole:+.1%})")
            lines.append(f"| {shape.name} | {tokens:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def measure(model: str, world: int, batch: int, new: int, backend: str) -> dict[str, Any]:
    """In this process, rank 0."""
    import torch

    import graft

    options = {
        "dtype": "float32",
        "device": "cpu",
        "backend": backend,
        "kv_cache_memory": "256MiB",
        "self_check": False,
    }
    llm = graft.LLM(model, tensor_parallel_size=world, max_model_len=256, **options)
    prompts = [[11 + row, 12, 13, 14] for row in range(batch)]
    llm.generate(prompts, graft.SamplingParams(max_tokens=3, ignore_eos=True))
    times = []
    for _ in range(3):
        llm.generate(prompts, graft.SamplingParams(max_tokens=new, ignore_eos=True))
        times.append(llm.stats.decode_seconds / (llm.stats.decode_tokens / batch))
    ranks = [note for note in llm.report.notes if note.startswith(("tensor parallel", "shard_tensor_parallel"))]
    pids = ["self"]
    if world > 1:
        leader: Any = llm.engine.graph
        pids += [str(process.pid) for process in leader.workers.processes.values()]
    return {
        "model": model, "ranks": world, "batch": batch, "threads": torch.get_num_threads(), "backend": llm.backend,
        "ms_a_step": round(1000 * sorted(times)[1], 2), "resident_mb": [*map(resident, pids)], "notes": ranks,
    }  # fmt: skip


def in_turns(model: str, batches: list[int], new: int, backend: str, repeats: int) -> list[dict[str, Any]]:
    """2 ranks with 1 thread each and 1 rank with 2, repeat by repeat in turns: what else runs here hits both."""
    import torch

    import graft

    options: Any = {"dtype": "float32", "device": "cpu", "backend": backend, "kv_cache_memory": "64MiB",
                    "self_check": False, "use_cache": False, "max_model_len": 128}  # fmt: skip
    torch.set_num_threads(2)
    one = graft.LLM(model, **options)
    two = graft.LLM(model, tensor_parallel_size=2, **options)
    leader: Any = two.engine.graph
    found = []
    for batch in batches:
        prompts = [[11 + row, 12, 13, 14] for row in range(batch)]
        params, times, shares = graft.SamplingParams(max_tokens=new, ignore_eos=True), ([], []), []
        for repeat in range(repeats + 1):
            for index, (llm, threads) in enumerate(((one, 2), (two, 1))):
                torch.set_num_threads(threads)
                leader.group.seconds, leader.seconds = 0.0, 0.0
                llm.generate(prompts, params)
                if repeat:  # the first warms up
                    times[index].append(1000 * llm.stats.decode_seconds / (llm.stats.decode_tokens / batch))
                    shares += [leader.group.seconds / leader.seconds] if index else []
        middle = [sorted(some)[len(some) // 2] for some in (*times, shares)]
        ratios = sorted(a / b for a, b in zip(*times, strict=True))
        found.append({
            "model": model, "backend": one.backend, "batch": batch, "repeats": repeats,
            "ms_of_1_rank": round(middle[0], 2), "ms_of_2_ranks": round(middle[1], 2),
            "speed_of_2": round(ratios[len(ratios) // 2], 3), "least": round(ratios[0], 3),
            "most": round(ratios[-1], 3), "communication": round(middle[2], 3),
        })  # fmt: skip
    return found


def norms(repeats: int = 300) -> None:
    """Two processes over gloo: µs of a sum over the ranks, and of the residual and norm behind it in one op."""
    import os

    import torch
    from torch import distributed

    import graft.ops.add_rms_norm.op  # noqa: F401

    if "RANK" not in os.environ:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        subprocess.run([*launcher, "-m", "benchmarks.tensor_parallel", "--norms"], check=True)
        return
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    for rows, hidden in ((1, 896), (8, 896), (1, 4096), (8, 4096)):
        x, residual, weight = torch.randn(rows, hidden), torch.randn(rows, hidden), torch.randn(hidden)
        calls = (
            lambda x=x: distributed.all_reduce(x.clone()),
            lambda x=x, r=residual, w=weight: torch.ops.graft.add_rms_norm(x, r, w, 1e-6),
        )
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(repeats):
            for call, taken in zip(calls, times, strict=True):
                started = time.perf_counter()
                call()
                taken.append(1e6 * (time.perf_counter() - started))
        if distributed.get_rank() == 0:
            exchanged, normed = (sorted(some)[repeats // 2] for some in times)
            least = [round(min(some), 1) for some in times]
            print(json.dumps({"rows": rows, "hidden": hidden, "exchange_us": round(exchanged, 1),
                              "add_norm_us": round(normed, 1), "least_us": least}), flush=True)  # fmt: skip
    distributed.destroy_process_group()


def resident(pid: str) -> int:
    """MB of a process that are its own, without files that it maps."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("RssAnon"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen2.5-0.5b")
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--new", type=int, default=12)
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--turns", action="store_true")
    parser.add_argument("--norms", action="store_true")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--alone", action="store_true", help="one measurement, in this process")
    asked = parser.parse_args()
    if asked.predict:
        print(predict(), predict_sequence(), sep="\n\n")
        return
    if asked.norms:
        norms()
        return
    if asked.turns:
        batches = [int(batch) for batch in asked.batch.split(",")]
        for row in in_turns(asked.model, batches, asked.new, asked.backend, asked.repeats):
            print(json.dumps(row), flush=True)
        return
    for world in map(int, asked.ranks.split(",")):
        for batch in map(int, asked.batch.split(",")):
            if asked.alone:
                print(json.dumps(measure(asked.model, world, batch, asked.new, asked.backend)), flush=True)
                continue
            own = ["--ranks", str(world), "--batch", str(batch), "--new", str(asked.new), "--backend", asked.backend]
            started = time.monotonic()
            subprocess.run(
                [sys.executable, "-m", "benchmarks.tensor_parallel", asked.model, *own, "--alone"], check=True
            )
            print(f"  ({time.monotonic() - started:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
