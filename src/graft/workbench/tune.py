"""Measures which kernel is best for the linear layers of a model, token count by token count."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from graft.files import Progress
from graft.ops.fused_linear.choice import Gemm, How, Matvec, Shape, how_text
from graft.ops.fused_linear.packing import GROUP
from graft.ops.fused_linear.triton import Call, padded_tokens, run_as, words_of

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
COLD = 600 << 20  # bytes of weights in turn, several times the 60 MB of L2 of an H200
MOST_COPIES = 24


@dataclass(frozen=True)
class Timing:
    shape: Shape
    tokens: int
    how: How
    microseconds: float
    gb_per_s: float

    def text(self) -> str:
        return f"{self.shape.key():<32} T={self.tokens:<4} {how_text(self.how):<92} {self.microseconds:8.2f} us {self.gb_per_s:7.0f} GB/s"


def candidates(shape: Shape, tokens: int) -> Iterator[How]:
    if shape.format == "plain":
        yield None
    if tokens <= 4 and shape.format != "int4":
        for rows in (1, 2, 4):
            for warps in (4, 8):
                for ahead in (0, 132 * 4) if tokens == 1 else (0,):
                    yield Matvec(rows, warps, ahead)
    if tokens >= 4 or shape.format == "int4":
        block = padded_tokens(tokens)
        tiles = ((128, 2), (128, 3)) if shape.format == "int4" else ((64, 4), (64, 6), (128, 3))
        for rows in (32, 64):
            for splits in (1, 2, 4):
                if splits > 1 and shape.n // rows * splits > 1200:
                    continue
                for depth, stages in tiles:
                    yield Gemm(rows, block, depth, splits, 4, stages, early=512 // depth)
        yield Gemm(64, block, *tiles[0][:1], 1, 4, tiles[0][1], early=0)


def make_calls(shape: Shape, tokens: int, device: torch.device) -> list[Call]:
    """As many calls on weights of their own as leave nothing of the first in the cache."""
    weight_rows = 2 * shape.n if shape.gated else shape.n
    size = weight_rows * shape.k * {"plain": 16, "int8": 8, "fp8": 8, "int4": 4}[shape.format] // 8
    copies = max(3, min(MOST_COPIES, -(-COLD // size)))
    x = torch.randn(tokens, shape.k, device=device, dtype=torch.bfloat16)
    norm = torch.randn(shape.k, device=device, dtype=torch.bfloat16) if shape.norm else None
    residual = (
        None if shape.gated or shape.norm else torch.randn(tokens, shape.n, device=device, dtype=torch.bfloat16)
    )
    activation = "silu" if shape.gated else "none"
    calls = []
    for _ in range(copies):
        weight, scale = make_weight(shape, weight_rows, device)
        calls.append(Call(x, weight, None, scale, norm, 1e-5, activation=activation, residual=residual))
    return calls


def make_weight(shape: Shape, rows: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    k = shape.k
    if shape.format == "plain":
        return torch.randn(rows, k, device=device, dtype=torch.bfloat16) * k**-0.5, None
    if shape.format == "int4":
        words = torch.randint(-(2**15), 2**15, (rows, words_of(k)), device=device, dtype=torch.int16)
        return words, torch.rand(rows, -(-k // GROUP), device=device, dtype=torch.bfloat16) * k**-0.5
    q = torch.randint(-127, 128, (rows, k), device=device, dtype=torch.int8)
    scale = torch.rand(rows, device=device) * k**-0.5 / 64
    return (q if shape.format == "int8" else (q.to(torch.bfloat16) / 8).to(torch.float8_e4m3fn)), scale


def graph_microseconds(work: Callable[[], Any], repeats: int = 15) -> float:
    """Median time of a replay of the work as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return sorted(times)[repeats // 2]


def tune(shape: Shape, tokens: int, device: torch.device) -> list[Timing]:
    """Every candidate, the fastest first. One that does not compile or run is left out, with a line that says so."""
    calls = make_calls(shape, tokens, device)
    ways = list(candidates(shape, tokens))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda how: compiled(calls[0], how), ways))
    moved = calls[0].weight.nbytes + (calls[0].scale.nbytes if calls[0].scale is not None else 0)
    found = []
    for how in ways:
        try:
            us = graph_microseconds(lambda how=how: [run_as(call, how) for call in calls]) / len(calls)
        except Exception as error:  # a configuration that needs more than the device has
            print(f"{shape.key()} {how_text(how)}: {type(error).__name__}: {str(error)[:200]}")
            continue
        found.append(Timing(shape, tokens, how, us, moved / us / 1000))
    return sorted(found, key=lambda timing: timing.microseconds)


def compiled(call: Call, how: How) -> None:
    try:
        run_as(call, how)
    except Exception:
        pass


def tune_all(
    shapes: Sequence[Shape], counts: Sequence[int], device: torch.device, progress: Progress | None = None
) -> dict[str, Any]:
    """The table of choice.py."""
    table: dict[str, Any] = {}
    name = torch.cuda.get_device_name(device)
    work = [(shape, tokens) for shape in shapes for tokens in counts]
    for index, (shape, tokens) in enumerate(work):
        if progress:
            progress(f"measuring {shape.key()}, {tokens} tokens", index, len(work))
        best = tune(shape, tokens, device)
        for timing in best[:3]:
            print(timing.text(), flush=True)
        entry = table.setdefault(shape.key(), {"device": name, "tokens": {}})
        entry["tokens"][str(tokens)] = described(best[0])
    return table


def described(timing: Timing) -> dict[str, Any]:
    kind = "library" if timing.how is None else type(timing.how).__name__.lower()
    options = {} if timing.how is None else asdict(timing.how)
    return {"kind": kind, **options, "us": round(timing.microseconds, 2)}


def model_shapes(
    hidden: int, middle: int, heads: int, kv: int, size: int, vocab: int, format: str = "plain"
) -> list[Shape]:
    """The products of a decoder layer, and of the head, which stays as it is."""
    return [
        Shape((heads + 2 * kv) * size, hidden, format, False, True),
        Shape(hidden, heads * size, format, False, False),
        Shape(middle, hidden, format, True, True),
        Shape(hidden, middle, format, False, False),
        *([Shape(vocab, hidden, "plain", False, True)] if format == "plain" else []),
    ]


LLAMA_8B = (4096, 14336, 32, 8, 128, 128256)
LLAMA_1B = (2048, 8192, 32, 8, 64, 128256)

if __name__ == "__main__":
    import sys

    device = torch.device("cuda", 0)
    table: dict[str, Any] = {}
    for part in sys.argv[2:]:
        model, format, counts = part.split(":")
        sizes = LLAMA_8B if model == "8b" else LLAMA_1B
        table_part = tune_all(model_shapes(*sizes, format=format), [int(c) for c in counts.split(",")], device)
        for key, entry in table_part.items():
            table.setdefault(key, {**entry, "tokens": {}})["tokens"].update(entry["tokens"])
        print(
            part,
            "sum of a step, us:",
            {
                c: round(
                    sum(
                        e["tokens"][c]["us"]
                        * (1 if key.split()[1].startswith("128256") else (32 if model == "8b" else 16))
                        for key, e in table_part.items()
                    )
                )
                for c in counts.split(",")
            },
            flush=True,
        )
        with open(sys.argv[1], "w") as file:
            json.dump(table, file, indent=1)
