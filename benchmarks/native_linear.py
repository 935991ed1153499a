"""The native product on this machine: bytes of weights read in a second, beside a plain sum over a large array.

    python benchmarks/native_linear.py [--threads 1 2] [--tokens 1 8] [--kinds bf16 q4] [--json file]

Shapes are SmolLM2-135M's. Each shape has so many copies of its weight that no cache holds them, and one call goes
through all of them, as a decode step does. The read bandwidth and all products are measured in turn, in one run; the
best of several rounds counts, for others use this machine too.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import graft
from graft.weights.native_tiles import CPP, pack

OPS = Path(graft.__file__).parent / "ops"
SHAPES = {  # name: k, n (columns of the result), gated, norm, residual
    "qkv": (576, 960, False, True, False),
    "o": (576, 576, False, False, True),
    "gate-up": (576, 1536, True, True, False),
    "down": (1536, 576, False, False, True),
    "head": (576, 49152, False, True, False),
}
KINDS = [*CPP, "halves"]  # the last: tiles of f16, multiplied as float16 where the CPU can
SPREAD = 160 << 20  # bytes of weights that one call goes through: five times a large cache


def build() -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        sys.exit("no C++ compiler (g++ or clang++) on this machine")
    output = Path(tempfile.mkdtemp(prefix="graft-bench-")) / "native_linear.so"
    flags = ["-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-pthread", "-shared"]
    if compiler.endswith(
        "g++"
    ):  # GCC on aarch64 would move the loads of a step to its start and run out of registers
        flags.append("-fno-schedule-insns")
    include = [f"-I{OPS / 'native'}", f"-I{OPS / 'fused_linear'}"]
    source = str(Path(__file__).with_suffix(".cpp"))
    subprocess.run([compiler, *flags, "-fPIC", *include, source, "-o", str(output)], check=True)
    return ctypes.CDLL(str(output))


def call(function: Any, tensors: list[Tensor], numbers: list[int]) -> Callable[[], None]:
    pointers = (ctypes.c_void_p * len(tensors))(*[t.data_ptr() for t in tensors])
    values = (ctypes.c_int64 * len(numbers))(*numbers)
    return functools.partial(invoke, function, tensors, pointers, values)


def invoke(function: Any, tensors: list[Tensor], pointers: Any, values: Any) -> None:
    del tensors  # what the pointers lead to: here to stay alive
    function(pointers, values)


def products(
    library: ctypes.CDLL, kind: str, shape: str, tokens: int, threads: int
) -> tuple[Callable[[], None], int]:
    """A call, and the bytes of weights that it reads."""
    k, n, gated, norm, residual = SHAPES[shape]
    form = "f16" if kind == "halves" else kind
    packed = pack(torch.randn(2 * n if gated else n, k) * k**-0.5, form, gated).data
    copies = max(1, -(-SPREAD // packed.numel()))
    weights, room = packed.repeat(copies), tokens * (k + 64) + 16
    tensors = [torch.randn(tokens, k), weights, torch.ones(k), torch.randn(tokens, n), torch.empty(tokens, n),
               torch.empty(threads * room), torch.empty(room)]  # fmt: skip
    options = [int(gated), int(norm), int(residual)]
    numbers = [KINDS.index(kind), threads, tokens, k, n, *options, copies, packed.numel(), room]
    return call(library.run_products, tensors, numbers), weights.numel()


def seconds(step: Callable[[], None]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    library, rows = build(), []
    large = torch.ones(SPREAD // 4 // 32768 * 32768)
    for threads in args.threads:
        plain = call(library.run_sum, [large, torch.zeros(1)], [threads, large.numel()])
        for kind in args.kinds:
            for tokens in args.tokens:
                for shape in args.shapes:
                    step, size = products(library, kind, shape, tokens, threads)
                    step()
                    pairs = [(seconds(plain), seconds(step)) for _ in range(args.rounds)]
                    read = large.nbytes / min(p[0] for p in pairs) / 1e9
                    reached = size / min(p[1] for p in pairs) / 1e9
                    rows.append({"threads": threads, "kind": kind, "tokens": tokens, "shape": shape,
                                 "gb_s": round(reached, 2), "read_gb_s": round(read, 2),
                                 "percent": round(100 * reached / read)})  # fmt: skip
                    show(rows[-1])
    return rows


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['threads']} threads  {row['kind']:5}{row['tokens']:3} tokens  {row['shape']:8}{row['gb_s']:7.2f} GB/s"
        f" of {row['read_gb_s']:6.2f}  {row['percent']:4} %", flush=True,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print("load", os.getloadavg())
    rows = measure(args)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
