"""graft::all_reduce_add_norm over memory that ranks read of each other: processes in Triton's interpreter."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from triton.runtime import interpreter

import graft.ops.all_reduce_add_norm.triton as kernels
import peer_worker
from gpu_code import compiled
from graft.base.errors import KernelUnavailable, NoRanks, RankFailed
from graft.dist.group import TorchGroup
from graft.ops import OPS, choose
from graft.ops.add_rms_norm.reference import add_rms_norm
from graft.ops.cases import tolerance
from graft.ops.peers import FOREVER, LANES, flags_at, peer_problem, region_size, row_width
from graft.ops.ranks import current_group, join, run_as_ranks
from peer_worker import EPS, ROWS, WIDTH, inputs
from processes import Forked

HERE = Path(peer_worker.__file__)
SOON = 300.0  # seconds, on a crowded machine


def run_ranks(folder, world, *hows):
    """What each rank gave at each call, and how far its lanes counted."""
    with (folder / "regions").open("wb") as regions:
        regions.truncate(world * region_size(row_width(torch.empty(1, WIDTH)), world))
    processes = [Forked(HERE, rank, world, folder, *hows[rank : rank + 1]) for rank in range(world)]
    assert [process.wait(SOON) for process in processes] == [0] * world
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


def expected(world, call):
    """Parts are added in the order of the ranks."""
    _, residual, weight = inputs(0, call)
    return add_rms_norm(sum(inputs(rank, call)[0] for rank in range(world)), residual, weight, EPS)


def wrong_by(found, world):
    """The largest difference of any call."""
    pairs = [(a, b) for call, given in enumerate(found) for a, b in zip(given, expected(world, call), strict=True)]
    return max(float((a - b).abs().max()) for a, b in pairs)


LIMIT = 8 * tolerance(torch.float32, WIDTH)  # of values up to 8


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_every_rank_gets_the_sum_of_all_parts(tmp_path, world):
    (first, epochs), *others = run_ranks(tmp_path, world)
    assert wrong_by(first, world) < LIMIT
    rounds = sum(-(-rows // LANES) for rows in ROWS)
    assert int(epochs[0]) == rounds and int(epochs[LANES - 1]) == 1
    for found, counted in others:
        assert torch.equal(counted, epochs)
        pairs = [pair for call in zip(found, first, strict=True) for pair in zip(*call, strict=True)]
        assert all(torch.equal(a, b) for a, b in pairs)


def test_a_rank_that_does_not_wait_gets_another_sum(tmp_path):
    (early, _), (late, _) = run_ranks(tmp_path, 2, "early", "late")
    assert wrong_by(early, 2) > 0.1
    assert wrong_by(late, 2) > 0.1, "rank 0 has written over its parts of earlier rows"


def alone_of_two(folder):
    """The memory of rank 0; the other never comes."""
    with (folder / "regions").open("wb") as regions:
        regions.truncate(2 * region_size(row_width(torch.empty(1, WIDTH)), 2))
    return peer_worker.mapped(folder, 0, 2)


def test_a_rank_that_never_comes_ends_the_kernel(tmp_path, monkeypatch):
    """As a kernel does on a GPU, which is compiled with its assertions; the interpreter leaves them out."""
    options = interpreter.interpreter_builder.options
    monkeypatch.setattr(interpreter.interpreter_builder, "options", replace(options, debug=True))
    memory = alone_of_two(tmp_path)
    with pytest.raises(Exception, match="another rank never wrote its part of a sum"):
        kernels.run_over(memory, *inputs(0, 0), EPS, 0.0, False, False, most=50)


def test_kernels_that_wait_for_a_rank_that_is_gone_are_let_go(tmp_path):
    """By another thread, once the kernel has written its own part and waits."""
    memory = alone_of_two(tmp_path)
    told = memory.own[flags_at(memory.width) :].view(torch.int64)

    def watch():
        while not int(told[0]):
            time.sleep(0.01)
        memory.let_go()

    watcher = threading.Thread(target=watch)
    watcher.start()
    kernels.run_over(memory, *inputs(0, 1), EPS, 0.0, False, False)
    watcher.join()
    assert int(memory.epochs[0]) == 2, "both of its rows"


def test_a_group_that_lost_a_rank_lets_kernels_go_and_keeps_no_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    memory = alone_of_two(tmp_path)
    group = TorchGroup(0, 2, "gloo", None, None)
    group.settle()  # nothing waits in kernels
    group.peers[memory.width] = memory
    group.settle()
    group.give_up()
    with pytest.raises(RankFailed, match="never wrote its part of a sum"):
        group.settle()
    assert group.broken and int(memory.own[flags_at(memory.width) :].view(torch.int64).min()) == FOREVER


def test_rows_are_filled_up_to_what_a_thread_moves():
    assert [row_width(torch.empty(2, size, dtype=torch.bfloat16)) for size in (1, 8, 9, 4096)] == [16, 16, 32, 8192]


def test_the_kernel_says_why_it_does_not_run():
    spec, (x, residual, weight) = OPS["all_reduce_add_norm"], inputs(0, 0)
    call = spec.call(x, residual, weight, 2, EPS)
    for changed, said in (
        ({}, "run on a GPU"),
        ({"x": x.half()}, "dtypes differ"),
        ({"residual": x[:, :8]}, "residual is"),
    ):
        with pytest.raises(KernelUnavailable, match=said):
            choose(spec, call._replace(**changed), "triton")
    assert peer_problem(1) == "one rank has nobody to exchange with"
    assert peer_problem(2) == "this process is no rank of a group"
    assert run_as_ranks([lambda: peer_problem(2)] * 2) == ["the ranks are threads of one process"] * 2
    with pytest.raises(NoRanks, match="threads of one process"):
        run_as_ranks([lambda: current_group(2).peer_memory(16, x)] * 2)

    class Two:
        rank, world, broken = 0, 2, False

    join(Two())
    try:
        assert peer_problem(2) is None
        assert choose(spec, call).name == "torch.distributed"  # ours by its name alone
    finally:
        join(None)


def test_on_hopper_parts_are_read_anew_and_flags_order_them():
    """Compiled, not run: 16 bytes a load, past the cache; what was written before a flag is there behind it."""
    (line,) = [line for line in compiled().stdout.splitlines() if line.startswith("peers")]
    assert line.split()[1:] == [
        "atom.global.sys.release.exch.b64", "ld.global.sys.acquire.b64", "ld.volatile.global.v4.b32", "asserts",
    ]  # fmt: skip
