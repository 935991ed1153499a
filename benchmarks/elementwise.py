"""What fuse_elementwise gains: real chains fused and unfused, medians of alternating repeats in one process.

python benchmarks/elementwise.py [--device cuda] [--dtype bfloat16] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import graft
from graft.cli.show import quiet_libraries

ON = {"transforms": {"fuse_elementwise": {"enabled": True}}}


class GeluNew(torch.nn.Module):
    """GPT-2's activation, spelled out: 8 ops."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))


class SoftCap(torch.nn.Module):
    """Gemma 2's logits: 3 ops."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x / 30.0) * 30.0


class GatedResidual(torch.nn.Module):
    """x + sigmoid(g) · y: 3 ops, 3 inputs."""

    def forward(self, x: torch.Tensor, g: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + torch.sigmoid(g) * y


class SquaredRelu(torch.nn.Module):
    """Primer's and Nemotron's activation: 2 ops."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x).square()


# module, inputs, width in the model it comes from
CHAINS = {
    "gelu_new": (GeluNew, 1, 3072),
    "soft_cap": (SoftCap, 1, 32768),
    "gated_residual": (GatedResidual, 3, 2048),
    "squared_relu": (SquaredRelu, 1, 8192),
}


def seconds(call: Callable[[], Any], device: str, least: float) -> float:
    """One run of `call`, averaged over as many as fill `least` seconds."""
    runs = 1
    while True:
        synchronize(device)
        started = time.perf_counter()
        for _ in range(runs):
            call()
        synchronize(device)
        took = time.perf_counter() - started
        if took >= least:
            return took / runs
        runs *= 2


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(name: str, rows: int, device: str, dtype: torch.dtype, repeats: int, least: float) -> dict[str, Any]:
    make, count, width = CHAINS[name]
    module = make().eval()
    inputs = tuple(torch.randn(1, rows, width, device=device).to(dtype) for _ in range(count))
    plain = graft.compile(module, inputs, backend="eager")
    fused = graft.compile(module, inputs, config=ON, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(fused(*inputs), plain(*inputs), rtol=0.02, atol=0.02)
        for call in (plain, fused):
            seconds(lambda call=call: call(*inputs), device, least)
        pairs = [
            tuple(seconds(lambda call=call: call(*inputs), device, least) for call in (plain, fused))
            for _ in range(repeats)
        ]
    return {
        "chain": name,
        "rows": rows,
        "width": width,
        "dtype": str(dtype).removeprefix("torch."),
        "unfused_us": round(1e6 * statistics.median(p for p, _ in pairs), 1),
        "fused_us": round(1e6 * statistics.median(f for _, f in pairs), 1),
        "speedup": round(statistics.median(p / f for p, f in pairs), 2),
        "kernel": fused.report.kernels["graft::elementwise"].names[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 128], help="tokens: 1 is decoding, more is prefill"
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--least", type=float, default=0.02, help="seconds that one timing lasts at least")
    parser.add_argument("--json", action="store_true", help="the numbers alone, as one JSON line")
    args = parser.parse_args()
    quiet_libraries()
    rows = []
    for name in CHAINS:
        for count in args.rows:
            row = measure(name, count, args.device, getattr(torch, args.dtype), args.repeats, args.least)
            rows.append(row)
            if not args.json:
                shape = f"[{count}, {row['width']}] {row['dtype']}"
                times = f"{row['unfused_us']:>9} µs unfused {row['fused_us']:>9} µs fused"
                print(f"{name:15} {shape:22} {times}   × {row['speedup']} ({row['kernel']})")
    device = torch.cuda.get_device_name() if args.device == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    setup = {**vars(args), "torch": torch.__version__, "device_name": device}
    print(json.dumps({"setup": setup, "rows": rows}))


if __name__ == "__main__":
    main()
