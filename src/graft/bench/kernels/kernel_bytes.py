"""How much each kernel of a decode step must read, where that can be told.

A profile names kernels and grids, not weights. A kernel whose programs compute 1, 2, 4 … output rows each has a grid
that is a weight's rows divided by that; where some of the model's weights fit a kernel's grid and together come as
often as it is called, and no other choice of weights does, they are what it reads. Everything else stays unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from operator import attrgetter
from typing import TYPE_CHECKING

import torch

from graft.bench.limits.traffic import cache_bytes
from graft.bench.plan import Cell
from graft.engine.llm import LLM

if TYPE_CHECKING:
    from graft.bench.kernels.kernel_times import KernelTime

ROWS_A_PROGRAM = (1, 2, 4, 8, 16, 32, 64, 128)
READS_WEIGHTS = ("linear", "matvec", "gemv", "gemm", "int4_gemm", "nvjet", "cutlass")
READS_CACHE = ("attention",)
NOT_THE_READER = ("combine", "merge", "reduce")  # the second pass of a split attention


@dataclass(frozen=True)
class WeightRead:
    rows: int
    bytes: int


def kernel_bytes(rows: list[KernelTime], llm: LLM, cell: Cell, context: float) -> list[KernelTime]:
    """The rows with `bytes` and `gb_per_s` where they are known."""
    weights = linear_weights(llm)
    cache = cell.batch * cache_bytes(llm.model.module, context, layers=llm.cache.layers)
    readers = [row for row in rows if reads_cache(row.name)]
    found = []
    for row in rows:
        size = cache if readers == [row] else weights_read(row, weights)
        found.append(row if size is None else replace(row, bytes=size, gb_per_s=size / row.us / 1e3))
    return found


def reads_cache(name: str) -> bool:
    small = name.lower()
    return any(word in small for word in READS_CACHE) and not any(word in small for word in NOT_THE_READER)


def linear_weights(llm: LLM) -> Counter[WeightRead]:
    """The weights of the graph's linear layers, and how often each size comes."""
    gm, found = llm.graph_module, Counter[WeightRead]()
    for node in gm.graph.nodes:
        if node.op == "call_function" and "linear" in str(node.target):
            weight = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
            if weight is not None and weight.op == "get_attr":
                value: torch.Tensor = attrgetter(weight.target)(gm)  # [n, k]
                found[WeightRead(value.shape[0], value.nbytes)] += 1
    return found


def weights_read(row: KernelTime, weights: Mapping[WeightRead, int]) -> float | None:
    """Bytes of the only weights that fit the kernel's grid and its number of calls, or None."""
    programs = row.grid.split("×")[0]
    if not programs.isdigit() or not any(word in row.name.lower() for word in READS_WEIGHTS):
        return None
    fitting = [w for w in weights if any(w.rows == int(programs) * each for each in ROWS_A_PROGRAM)]
    choices = [
        chosen
        for size in range(1, len(fitting) + 1)
        for chosen in combinations(fitting, size)
        if sum(weights[w] for w in chosen) == row.calls
    ]
    if len(choices) != 1:
        return None
    return float(sum(w.bytes * weights[w] for w in choices[0]))
