"""Milliseconds of a step that writes a stacked cache layer by layer: Inductor alone, and with graft's fix.

PYTHONPATH=src python benchmarks/functionalization.py [--layers 8] [--megabytes 34] [--device cpu]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import torch
import torch._inductor.compile_fx as compile_fx

from graft.memory.inductor_fix.functionalization import inductor_options, reports


@torch.library.custom_op("bench::kv_write_", mutates_args=("cache",))
def kv_write_(cache: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> None:
    cache.index_copy_(1, at, rows)


kv_write_.register_fake(lambda *_: None)


def step(cache: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """cache [l, b, s, h], rows [b, 1, h]: every layer writes its row and reads it back."""
    total = rows
    for layer in range(cache.shape[0]):
        torch.ops.bench.kv_write_(cache[layer], rows + layer, at)
        total = total + cache[layer, :, :4].sum(1, keepdim=True)
    return total


def measure(options: dict, inputs: tuple, repeats: int) -> tuple[float, int]:
    """Median milliseconds, and how often a clone of the whole cache is in the final graph."""
    torch._dynamo.reset()
    clones = 0

    def count(gm: torch.fx.GraphModule, is_inference: bool) -> None:
        nonlocal clones
        passes(gm, is_inference)
        whole = [n for n in gm.graph.nodes if n.target is torch.ops.aten.clone.default]
        clones += sum(n.meta["val"].numel() == inputs[0].numel() for n in whole)

    passes = compile_fx.post_grad_passes
    compile_fx.post_grad_passes = count
    compiled = torch.compile(step, options=options)
    with torch.no_grad(), torch._inductor.config.patch(fx_graph_cache=False):
        compiled(*inputs)
        compile_fx.post_grad_passes = passes
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            compiled(*inputs)
            if inputs[0].is_cuda:
                torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * 1000)
    return statistics.median(times), clones


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--megabytes", type=float, default=34)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    width, batch = 128, 8
    length = int(arguments.megabytes * 2**20 / 4 / width / batch / arguments.layers)
    cache = torch.zeros(arguments.layers, batch, length, width, device=arguments.device)
    rows = torch.randn(batch, 1, width, device=arguments.device)
    inputs = (cache, rows, torch.tensor([3], device=arguments.device))
    for name, options in (("inductor", {}), ("with graft's fix", inductor_options())):
        milliseconds, clones = measure(options, inputs, arguments.repeats)
        print(
            f"{name:18} {milliseconds:8.2f} ms a step, {clones} clones of the cache ({cache.nbytes / 2**20:.0f} MB)"
        )
    print("\n".join(report.text() for report in reports()))


if __name__ == "__main__":
    main()
