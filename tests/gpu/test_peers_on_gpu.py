"""graft::all_reduce_add_norm over symmetric memory: two ranks share the GPU. Nothing here can hang: kernels that wait
give up, and processes are killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import torch

import peer_gpu_worker
from graft.ops.add_rms_norm.reference import add_rms_norm
from graft.ops.cases import tolerance
from peer_gpu_worker import DTYPES, EPS, EXCHANGES, REPLAYS, SHAPES, WIDTH, inputs, layers

LIMIT = 200.0  # seconds of a program, compiling and importing included


def run_ranks(folder, program, world=2):
    """What each rank saved."""
    command = [sys.executable, peer_gpu_worker.__file__, program]
    paths = os.pathsep.join(path for path in sys.path if path)
    logs = [folder / f"{rank}.log" for rank in range(world)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as out:
            asked = [*command, str(rank), str(world), str(folder)]
            environment = {**os.environ, "PYTHONPATH": paths}
            processes.append(subprocess.Popen(asked, stdout=out, stderr=out, env=environment))
    until = time.monotonic() + LIMIT
    try:
        codes = [process.wait(max(until - time.monotonic(), 0.1)) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * world, "\n".join(log.read_text()[-2000:] for log in logs)
    return [torch.load(folder / f"{program}.{rank}.pt") for rank in range(world)]


def difference(found, expected):
    """Relative to values of some units."""
    return max(float((a.double() - b.double().cpu()).abs().max()) for a, b in zip(found, expected, strict=True))


def expected_of(shape, dtype):
    parts = [inputs(shape, rank, dtype) for rank in range(2)]
    total = (parts[0][0].float() + parts[1][0].float()).to(dtype)
    return add_rms_norm(total, parts[0][1], parts[0][2], EPS)


def test_two_ranks_get_the_sum_of_both_parts(tmp_path):
    first, second = run_ranks(tmp_path, "sums")
    kinds = [(shape, dtype) for shape in SHAPES for dtype in DTYPES]
    for (shape, dtype), one, other in zip(kinds, first, second, strict=False):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), "equal bits on both"
        assert difference(one, expected_of(shape, dtype)) < 16 * tolerance(dtype, shape[-1]), (shape, dtype)
    # one rank's part is 5 % too large: the comparison sees it
    right = expected_of(SHAPES[0], torch.float32)
    assert difference(first[-1], right) > 100 * 16 * tolerance(torch.float32, SHAPES[0][-1])


def in_one_process(x, residual, weight):
    """Both ranks' layers: their parts of x are a third and two thirds of it, which is x."""
    return layers(2, x, residual, weight, lambda *args: add_rms_norm(*args, EPS))


def test_a_captured_graph_goes_on_counting(tmp_path):
    first, second = run_ranks(tmp_path, "graph")
    assert len(first) == REPLAYS + 1
    _, residual, weight = inputs((1, 3, WIDTH), 7)
    order = [*range(REPLAYS // 2 + 1), REPLAYS // 2, *range(REPLAYS // 2 + 1, REPLAYS)]
    limit, stale = EXCHANGES * 16 * tolerance(torch.float32, WIDTH), 0
    for replay, one, other in zip(order, first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), replay
        expected, earlier = (
            in_one_process(inputs((1, 3, WIDTH), n + replay)[0], residual, weight) for n in (1000, 999)
        )
        assert difference(one, expected) < limit, replay
        stale += difference(one, earlier) > 10 * limit
    assert stale == len(first), "what an earlier replay left would be seen"


def test_a_rank_that_never_comes_fails_the_kernel(tmp_path):
    said, _ = run_ranks(tmp_path, "lost")
    assert "assert" in said, said


def test_a_rank_that_is_gone_lets_the_kernel_go(tmp_path):
    """The context is as good as before; both of the lane's rows went through."""
    said, _ = run_ranks(tmp_path, "gone")
    assert "never wrote its part of a sum" in said and said.endswith(" 2"), said


def test_an_engine_on_two_ranks_gives_the_tokens_of_one(tmp_path):
    """Rank 0's process starts the other by itself."""
    ((one, two, matches),) = run_ranks(tmp_path, "engine", world=1)
    assert one == two and matches == 3
