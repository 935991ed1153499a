"""What a fused op gains over the calls it replaces, at the shapes of its cases: medians and their ratio.

python benchmarks/fusions.py --device cuda --only rope rms_norm

A ratio above 1 says that the fused op is faster. To measure another fusion, add a row to ROWS.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from graft.ops import OPS, choose
from graft.ops.cases import Case


@dataclass(frozen=True)
class Row:
    """`fused` and `unfused` take what a case makes and give the function to time, with its kernels chosen."""

    name: str
    fused: Callable[..., Callable[[], Any]]
    unfused: Callable[..., Callable[[], Any]]
    cases: list[Case]
    captured: bool = True  # whether its calls can go into a CUDA graph


def kernel(op: str, *args: Any) -> Callable[[], Any]:
    """An op as the eager backend runs it: the kernel is chosen once."""
    run = choose(OPS[op], OPS[op].call(*args)).run
    return lambda: run(*args)


def op(name: str) -> Callable[..., Callable[[], Any]]:
    return lambda *args: kernel(name, *args)


def spelled_out(name: str) -> Callable[..., Callable[[], Any]]:
    """The calls of the model's own code: the op's reference."""
    return lambda *args: lambda: OPS[name].reference(*args)


def cases(name: str) -> list[Case]:
    return importlib.import_module(f"graft.ops.{name}.cases").CASES


SPELLED_OUT = ("rms_norm", "add_rms_norm", "layer_norm", "swiglu", "rope", "attention", "moe_route", "moe_experts")
SYNCHRONIZING = ("moe_experts",)  # the model's own code asks how many rows each expert has
ROWS = [
    *(Row(name, op(name), spelled_out(name), cases(name), name not in SYNCHRONIZING) for name in SPELLED_OUT),
]


def seconds(run: Callable[[], Any], device: str, iterations: int) -> float:
    """One call, averaged over `iterations` in a row."""
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(iterations):
            run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000 / iterations
    started = time.perf_counter()
    for _ in range(iterations):
        run()
    return (time.perf_counter() - started) / iterations


def recorded(run: Callable[[], Any], iterations: int) -> Callable[[], Any]:
    """The calls as a CUDA graph, so that the device is timed and not Python's launches."""
    run()  # compiles and tunes outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(iterations):
            run()
    return graph.replay


def measure(row: Row, case: Case, device: str, dtype: torch.dtype, iterations: int, repeats: int) -> dict[str, Any]:
    """Alternating repeats after a warm-up; `launched` counts Python's launches, `device` does not."""
    args = case.make(device, dtype, torch.Generator().manual_seed(0))
    pair = [make(*args) for make in (row.fused, row.unfused)]
    times: dict[str, list[list[float]]] = {"launched": [[], []]}
    graphs: list[Callable[[], Any]] = []
    with torch.inference_mode():
        if device == "cuda" and row.captured:
            times["device"] = [[], []]
            graphs = [recorded(run, iterations) for run in pair]
        for repeat in range(repeats + 1):  # the first one warms up
            for which in (0, 1):
                launched = seconds(pair[which], device, iterations)
                replayed = seconds(graphs[which], device, 10) / iterations if graphs else 0.0
                if repeat:
                    times["launched"][which].append(launched)
                if repeat and graphs:
                    times["device"][which].append(replayed)
    result: dict[str, Any] = {"fusion": row.name, "case": case.name}
    for kind, (fused, unfused) in times.items():
        ours, theirs = statistics.median(fused), statistics.median(unfused)
        result[kind] = {
            "fused_us": round(1e6 * ours, 2),
            "unfused_us": round(1e6 * theirs, 2),
            "ratio": round(theirs / ours, 2),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default=None, help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--only", nargs="+", default=[row.name for row in ROWS], choices=[row.name for row in ROWS])
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON document instead of lines")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype or ("bfloat16" if args.device == "cuda" else "float32"))
    rows = []
    for row in (row for row in ROWS if row.name in args.only):
        for case in row.cases:
            rows.append(measure(row, case, args.device, dtype, args.iterations, args.repeats))
            if not args.json:
                print(line(rows[-1]))
    if args.json:
        name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
        setup = {**vars(args), "dtype": str(dtype), "torch": torch.__version__, "device_name": name}
        print(json.dumps({"setup": setup, "rows": rows}))


def line(row: dict[str, Any]) -> str:
    kinds = [
        f"{kind} {t['fused_us']} µs, unfused {t['unfused_us']} µs, ratio {t['ratio']}"
        for kind, t in row.items()
        if isinstance(t, dict)
    ]
    return f"{row['fusion']}, {row['case']}: {'; '.join(kinds)}"


if __name__ == "__main__":
    main()
