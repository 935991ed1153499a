"""Experts of a mixture at decode: every kernel of graft::moe_experts beside the bytes that it must read.

    python -m benchmarks.experts [--model qwen3-30b-a3b mixtral-8x7b gpt-oss-20b] [--tokens 1 2 4 8 16 64] [--packed float int8 int4 fp8] [--sweep] [--json FILE]

Microseconds inside a CUDA graph, router (graft::moe_route) included, medians; every call of a graph has weights of its own, more than the
second-level cache holds. --packed: formats of the weights, one row each; scales count as bytes. share: of the bandwidth that the chosen experts' bytes reach, as measured in the same run. --sweep: sizes of the
GEMV kernels at one token, the fastest first; put them into ops/moe_experts/gemv.py: sizes_for. --device cpu measures what runs there.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graft.base.timers import call_seconds
from graft.bench.limits.roofline import cpu_read, gpu_read
from graft.ops import OPS, choose
from graft.ops.moe_experts.gemv import Sizes, moe_experts_gemv
from graft.ops.selection import problem_of
from graft.weights.quantize import QUANTIZERS
from graft.weights.stacked import StackLayout, pack_stacked

FLOAT = "float"  # weights in the working dtype
L2 = 60 << 20  # bytes of an H200's second-level cache


class Shape(NamedTuple):
    experts: int
    top_k: int
    hidden: int
    width: int  # of an expert
    transposed: bool = False  # weights lie as [e, in, out], gate and up take turns, with biases (gpt-oss)


SHAPES = {
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768),
    "mixtral-8x7b": Shape(8, 2, 4096, 14336),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880, True),
    "tiny": Shape(8, 2, 64, 48),
}


class Layer(NamedTuple):
    """One layer: what the router reads, and the arguments of the op behind weights and ids."""

    x: Tensor
    logits: Tensor
    rest: tuple[Any, ...]


def make_layers(
    shape: Shape, tokens: int, device: torch.device, dtype: torch.dtype, format: str = FLOAT
) -> list[Layer]:
    """As many as overflow the cache twice with what one token reads."""
    e, k, d, f, transposed = shape
    chosen = k * 3 * d * f * (dtype.itemsize if format == FLOAT else 1)
    count = 1 if device.type == "cpu" else max(2, min(16, 2 * L2 // chosen + 1))
    made = []
    for index in range(count):
        g = torch.Generator(device).manual_seed(index)
        randn = partial(torch.randn, generator=g, device=device, dtype=dtype)
        gate_up, down = randn(e, 2 * f, d) * d**-0.5, randn(e, d, f) * f**-0.5
        more: tuple[Any, ...] = ("silu",)
        if format != FLOAT:
            (gate_up, up_scale), (down, down_scale) = (packed(w, format, index) for w in (gate_up, down))
            biases = (randn(e, 2 * f), randn(e, d)) if transposed else (None, None)
            activation = "clamped_swiglu" if transposed else "silu"
            more = (activation, *biases, False, False, up_scale, down_scale)
        elif transposed:
            gate_up, down = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (gate_up, down))
            more = ("clamped_swiglu", randn(e, 2 * f), randn(e, d), True)
        made.append(Layer(randn(tokens, d), randn(tokens, e), (gate_up, down, *more)))
    return made


def packed(weight: Tensor, format: str, seed: int) -> tuple[Tensor, Tensor]:
    """One expert is rounded; the others are permutations of its rows: rounding all would take minutes."""
    q, scale, _ = pack_stacked(weight[:1], format, StackLayout(), "experts", search=False)
    g = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(q.shape[1], generator=g).to(q.device) for _ in range(len(weight))]
    words = q.view(torch.uint8)  # indexing knows no float8
    return torch.stack([words[0, o] for o in orders]).view(q.dtype), torch.stack([scale[0, o] for o in orders])


def run_layer(layer: Layer, shape: Shape, experts: Callable[..., Tensor]) -> Tensor:
    weights, ids = torch.ops.graft.moe_route(layer.logits, shape.top_k, True, layer.x.dtype)
    return experts(layer.x, weights, ids, *layer.rest)


def us(layers: Sequence[Layer], shape: Shape, experts: Callable[..., Tensor], device: torch.device) -> float:
    def work() -> None:
        for layer in layers:
            run_layer(layer, shape, experts)

    with torch.inference_mode():
        return call_seconds(work, device) / len(layers) * 1e6


def read_bytes(layers: Sequence[Layer], shape: Shape) -> float:
    """Of the experts that the tokens of each layer reach, on average, with scales."""
    reached = [len(set(layer.logits.topk(shape.top_k, dim=-1).indices.flatten().tolist())) for layer in layers]
    gate_up, down, *_ = layers[0].rest
    scales = [one for one in layers[0].rest[8:] if isinstance(one, Tensor)]
    return sum(reached) / len(reached) * sum(one.nbytes for one in (gate_up, down, *scales)) / shape.experts


def measure(
    name: str, tokens: int, device: torch.device, dtype: torch.dtype, rate: float, format: str = FLOAT
) -> dict[str, Any]:
    shape, spec = SHAPES[name], OPS["moe_experts"]
    layers = make_layers(shape, tokens, device, dtype, format)
    weights, ids = torch.ops.graft.moe_route(layers[0].logits, shape.top_k, True, dtype)
    call = spec.call(layers[0].x, weights, ids, *layers[0].rest)
    needed = read_bytes(layers, shape)
    row: dict[str, Any] = {
        "model": name,
        "weights": format,
        "tokens": tokens,
        "MB": needed / 1e6,
        "bound us": needed / rate * 1e6,
    }
    row["chosen"] = choose(spec, call).name
    for kernel in spec.table:
        problem = problem_of(kernel, call)
        if problem is None and (kernel.kind != "reference" or kernel.name == row["chosen"]):
            row[kernel.name] = us(layers, shape, kernel.run, device)
    row["share"] = row["bound us"] / row[row["chosen"]] if row["chosen"] in row else None
    return row


def sweep(name: str, device: torch.device, dtype: torch.dtype, rate: float) -> list[dict[str, Any]]:
    """Sizes of both kernels at one token, each with the other at its default."""
    shape = SHAPES[name]
    layers, found = make_layers(shape, 1, device, dtype), []
    deep = (16, 32, 64, 128) if shape.transposed else (128, 256, 512, 1024, 2048)
    wide = (16, 32, 64, 128) if shape.transposed else (1, 2, 4, 8, 16)
    for side, rows, depth, warps in product(("up_sizes", "down_sizes"), wide, deep, (2, 4, 8)):
        sizes = Sizes(rows, depth, warps)
        held = rows * depth * (2 if side == "up_sizes" else shape.top_k) // (32 * warps)  # numbers of a thread
        if not 8 <= held <= 256:
            continue
        try:
            took = us(layers, shape, partial(moe_experts_gemv, **{side: sizes}), device)
        except Exception as error:  # noqa: BLE001  a size that does not compile is a row
            found.append({"model": name, side: asdict(sizes), "failed": str(error).splitlines()[0]})
            continue
        found.append(
            {"model": name, side: asdict(sizes), "us": took, "share": read_bytes(layers, shape) / rate * 1e6 / took}
        )
    return sorted(found, key=lambda row: row.get("us", float("inf")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", nargs="+", choices=SHAPES, default=["qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b"]
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 4, 8, 16, 64])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--packed", nargs="+", choices=[FLOAT, *QUANTIZERS], default=[FLOAT])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device, dtype = torch.device(given.device), getattr(torch, given.dtype)
    rate, how = gpu_read(device) if device.type == "cuda" else cpu_read()
    print(f"{rate / 1e9:.0f} GB/s ({how})", flush=True)
    rows = []
    for name in given.model:
        made = sweep(name, device, dtype, rate) if given.sweep else [
            measure(name, tokens, device, dtype, rate, format) for tokens in given.tokens for format in given.packed
        ]  # fmt: skip
        for row in made:
            print(
                {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()},
                flush=True,
            )
        rows += made
    if given.json:
        given.json.write_text(json.dumps({"read_bytes_per_s": rate, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
