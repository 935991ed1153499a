"""A rank on the first GPU, which all ranks share: exchanges over symmetric memory, in and out of CUDA graphs.

    python peer_gpu_worker.py PROGRAM RANK WORLD FOLDER     the result is saved as FOLDER/PROGRAM.RANK.pt

Ranks take turns on the GPU, a slice of time each, so that an exchange takes milliseconds here.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

import graft.ops.all_reduce_add_norm.triton as kernels
from graft.base.errors import RankFailed
from graft.dist.group import TorchGroup, connect
from graft.ops import OPS, choose
from graft.ops.peers import peer_memory

EPS, WIDTH = 1e-5, 512
SHAPES = [(1, 1, 4096), (1, 70, 2304), (3, 37), (1, 200, 64)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EXCHANGES, REPLAYS = 6, 100
LOOKS = 2**24  # some seconds, of a rank that is alone on the GPU
Exchange = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def inputs(shape: tuple[int, ...], rank: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    own, shared = (torch.Generator().manual_seed(seed) for seed in (rank, 99))
    part = torch.randn(shape, generator=own)
    residual, weight = torch.randn(shape, generator=shared), torch.randn(shape[-1:], generator=shared)
    return tuple(one.to(device="cuda", dtype=dtype) for one in (part, residual, weight))


def exchange(x: Tensor, residual: Tensor, weight: Tensor, world: int = 2) -> tuple[Tensor, Tensor]:
    """By the kernel's name: it runs, or says why not."""
    spec, args = OPS["all_reduce_add_norm"], (x, residual, weight, world, EPS)
    return choose(spec, spec.call(*args), "triton").run(*args)


def layers(rank: int, x: Tensor, residual: Tensor, weight: Tensor, do: Exchange) -> tuple[Tensor, Tensor]:
    """Each rank makes its part of what all have: of two, a third and two thirds."""
    for _ in range(EXCHANGES):
        x, residual = do(x * ((rank + 1) / 3), residual, weight)
    return x, residual


def sums(group: TorchGroup) -> Any:
    found = []
    for shape in SHAPES:
        for dtype in DTYPES:
            found.append([one.cpu() for one in exchange(*inputs(shape, group.rank, dtype), group.world)])
    part, residual, weight = inputs(SHAPES[0], group.rank)
    wrong = part * (1 + 0.05 * group.rank)
    found.append([one.cpu() for one in exchange(wrong, residual, weight, group.world)])
    return found


def graph(group: TorchGroup) -> Any:
    """One capture, replayed on other inputs; then without a graph again, and replayed again."""
    x, residual, weight = inputs((1, 3, WIDTH), 7)
    peer_memory(x, group.world)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        layers(group.rank, x, residual, weight, exchange)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=side):
            out = layers(group.rank, x, residual, weight, exchange)
        found = []
        for replay in range(REPLAYS):
            x.copy_(inputs((1, 3, WIDTH), 1000 + replay)[0])
            captured.replay()
            found.append([one.cpu() for one in out])
            if replay == REPLAYS // 2:
                found.append([one.cpu() for one in layers(group.rank, x, residual, weight, exchange)])
    return found


def lost(group: TorchGroup) -> Any:
    """Rank 1 makes its memory and then nothing; rank 0 must end by itself."""
    x, residual, weight = inputs((1, 1, WIDTH), group.rank)
    memory = peer_memory(x, group.world)
    said = "rank 1 does nothing"
    if group.rank == 0:
        try:
            kernels.run_over(memory, x, residual, weight, EPS, 0.0, False, False, most=LOOKS)
            torch.cuda.synchronize()
            said = "it did not end"
        except RuntimeError as error:  # pyrefly: ignore
            said = str(error)
    return said


def gone(group: TorchGroup) -> Any:
    """The same, but somebody sees it, as the thread that watches the other processes does."""
    x, residual, weight = inputs((1, 70, WIDTH), group.rank)
    memory = peer_memory(x, group.world)
    if group.rank == 0:
        kernels.run_over(memory, x, residual, weight, EPS, 0.0, False, False)
        watcher = threading.Timer(2.0, group.give_up)
        watcher.start()
        try:
            group.settle()
        except RankFailed as failed:
            return f"{failed} {int(memory.epochs[0])}"
    return "nothing to wait for"


def engine(folder: Path) -> Any:
    """Rank 0 starts the other by itself. The tokens of one rank, and which kernel gave them."""
    import graft

    options: Any = {"dtype": "float32", "kv_cache_memory": "16MiB", "use_cache": False, "device": "cuda:0"}
    config = {"transforms": {"fuse_all_reduce_norm": {"enabled": True}}, "kernels": {"all_reduce_add_norm": "triton"}}
    params = graft.SamplingParams(max_tokens=8, ignore_eos=True)
    prompts = [[5, 6, 7, 8], [9, 10, 11], list(range(20, 100))]
    one = [o.token_ids for o in graft.LLM("tiny-llama", **options).generate(prompts, params)]
    llm = graft.LLM("tiny-llama", tensor_parallel_size=2, config=config, **options)
    two = [o.token_ids for o in llm.generate(prompts, params)]
    matches = len(llm.report.transforms["fuse_all_reduce_norm"].matches)
    llm.engine.graph.close()
    return one, two, matches


def main(program: str, rank: int, world: int, folder: Path) -> None:
    if program == "engine":
        result = engine(folder)
    else:
        torch.cuda.set_device(0)
        group = connect(rank, world, "gloo", lambda: distributed.FileStore(str(folder / program), world))
        group.enter()
        result = {"sums": sums, "graph": graph, "lost": lost, "gone": gone}[program](group)
        if program in ("sums", "graph"):
            group.said("done")  # nobody frees what another still reads
    torch.save(result, folder / f"{program}.{rank}.partial")
    (folder / f"{program}.{rank}.partial").rename(folder / f"{program}.{rank}.pt")
    sys.stdout.flush()
    os._exit(0)  # a GPU whose kernel failed answers nothing any more, the end of the process included


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
