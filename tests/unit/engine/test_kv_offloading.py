"""Blocks that the cache has no room for lie in host memory, and come back as they went."""

from __future__ import annotations

import random

import pytest
import torch

import graft
from cache_model import make
from capture_cases import engine, run
from graft.base.errors import CacheMisuse, EngineFailed, OutOfMemory, UsageError
from graft.engine.kv import offload
from graft.engine.kv.moves import Copy, Offload, Reload
from graft.engine.kv.offload import HostMemory, host_memory, slots_for
from graft.engine.kv.tensors import LayerShape, allocate, copy_blocks
from graft.engine.options import EngineOptions
from graft.weights.quantize import FP8

CPU = torch.device("cpu")
BLOCK = 4096  # bytes of a block of tiny mistral
SMALL = {"blocks": 9, "max_num_seqs": 12, "max_num_batched_tokens": 48, "admission": "greedy"}


def with_host(record: bool, slots: int, **options) -> graft.LLM:
    llm = engine("mistral", record, **{**SMALL, **options}, kv_offloading_size=slots * BLOCK)
    assert llm.engine.manager.host.slots == slots, "the size of a block of this model has changed"
    return llm


def filled(dtype: torch.dtype, blocks: int = 5) -> list[torch.Tensor]:
    layers = [LayerShape(2, 16, dtype), LayerShape(1, 24, dtype), LayerShape(1, 40, dtype, tensors=1)]
    tensors = allocate(layers, blocks, 16, CPU)
    generator = torch.Generator().manual_seed(0)
    for tensor in tensors:
        tensor.view(torch.uint8).random_(0, 256, generator=generator)
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_moves_are_made_bit_for_bit_and_in_order(dtype, monkeypatch):
    """Many more than the staging memory takes at once; slots and blocks are used again."""
    monkeypatch.setattr(offload, "AT_ONCE", 3)
    tensors, rng = filled(dtype), random.Random(1)
    moves, written = [], set()
    for _ in range(60):
        kind = rng.choice([Offload, Offload, Reload, Copy])
        if kind is Copy:
            moves.append(Copy(*rng.sample(range(5), 2)))
        elif kind is Offload or not written:
            moves.append(Offload(rng.randrange(5), rng.randrange(4)))
            written.add(moves[-1].slot)
        else:
            moves.append(Reload(rng.choice(sorted(written)), rng.randrange(5)))
    for some in (
        moves,
        [move for move in moves if not isinstance(move, Copy)],
        [m for m in moves if isinstance(m, Copy)],
    ):
        caches = [tensor.clone() for tensor in tensors]
        expected = [[cache[block].clone() for cache in caches] for block in range(5)]
        make(expected, [[] for _ in range(4)], some)
        HostMemory(caches, 4).move(caches, some)
        for cache, *blocks in zip(caches, *expected, strict=True):
            assert all(cache[i].view(torch.uint8).equal(block.view(torch.uint8)) for i, block in enumerate(blocks))


def test_an_engine_without_host_memory_makes_no_moves_to_it():
    with pytest.raises(CacheMisuse, match="has no memory for them there"):
        copy_blocks(filled(torch.float32), [Copy(0, 1), Offload(0, 0)])


@pytest.mark.some(1)
@pytest.mark.parametrize("slots", [64, 3])
@pytest.mark.parametrize("record", [False, True])
def test_tokens_are_those_of_an_engine_without_it(record, slots):
    """Arrivals, priorities, n > 1, requests that give way: the same tokens, and fewer are computed."""
    expected = run(engine("mistral", record, **SMALL), 3, 25)
    llm = with_host(record, slots)
    got = run(llm, 3, 25)
    assert [r.new_tokens for r in got] == [r.new_tokens for r in expected]
    stats = llm.engine.manager.stats()
    assert stats.reloaded_tokens > 0 and (stats.host_cached == 3 or slots == 64)
    assert sum(r.preemptions for r in got) > 0 and stats.evictions > 20
    assert llm.engine.manager.available == llm.engine.manager.blocks


@pytest.mark.parametrize("wrong", ["offload", "reload"])
def test_tokens_are_others_where_a_move_is_left_out(monkeypatch, wrong):
    monkeypatch.setattr(HostMemory, wrong, lambda *_: None)
    expected = run(engine("mistral", False, **SMALL), 3, 25)
    assert [r.new_tokens for r in run(with_host(False, 64), 3, 25)] != [r.new_tokens for r in expected]


def test_a_prompt_that_was_evicted_is_not_computed_again():
    params = graft.SamplingParams(max_tokens=2, ignore_eos=True)
    prompts = [[*range(3 + 20 * i, 68 + 20 * i)] for i in range(3)]  # 65 tokens: 4 blocks and one
    plain, llm = engine("mistral", False, **SMALL), with_host(False, 16)
    for one, cached in ((plain, [0, 0, 0, 0]), (llm, [0, 0, 0, 64])):
        requests = []
        for prompt in (*prompts, prompts[0]):
            requests.append(one.engine.add(prompt, params))
            while not one.engine.idle:
                one.engine.step()
        assert [request.cached for request in requests] == cached
    assert llm.engine.manager.stats().reloaded_tokens == 64


def test_decode_steps_go_ahead_while_blocks_leave():
    """No step waits for a move: as many run ahead as without host memory, and their tokens are the same."""
    params = graft.SamplingParams(max_tokens=60, ignore_eos=True)
    ahead, tokens = [], []
    for llm in (engine("mistral", True, **SMALL), with_host(True, 16)):
        for start in (3, 40, 3):  # the second one evicts the blocks of the first
            (one,) = llm.generate([[*range(start, start + 60)]], params)
            tokens.append(one.token_ids)
        ahead.append(llm.stats.steps_ahead)
    assert ahead[0] == ahead[1] > 50 and tokens[:3] == tokens[3:]
    assert llm.engine.manager.stats().reloaded_tokens > 0


def test_a_move_that_fails_ends_the_engine(monkeypatch):
    """Its blocks have names of what they do not hold."""
    llm = with_host(False, 16)
    params = graft.SamplingParams(max_tokens=2, ignore_eos=True)
    prompts = [[*range(3 + 20 * i, 68 + 20 * i)] for i in range(3)]
    for prompt in prompts:
        llm.generate([prompt], params)
    monkeypatch.setattr(HostMemory, "reload", lambda *_: 1 / 0)
    with pytest.raises(EngineFailed):
        llm.generate([prompts[0]], params)
    with pytest.raises(EngineFailed, match="moving blocks between device and host failed"):
        llm.generate([prompts[1]], params)


def test_what_cannot_be_is_refused(monkeypatch):
    with pytest.raises(UsageError, match="kv_offloading_size is a size like 2GiB"):
        EngineOptions(kv_offloading_size="much")
    with pytest.raises(UsageError, match="enable_prefix_caching=False leaves it nothing"):
        EngineOptions(kv_offloading_size="1MiB", enable_prefix_caching=False)
    with pytest.raises(UsageError, match=r"kv_offloading_size=9 holds no block .* which takes 4\.0 KiB"):
        slots_for(9, BLOCK)
    monkeypatch.setattr(offload, "free_memory", lambda device: 1 << 20)
    with pytest.raises(OutOfMemory, match=r"1\.0 GiB of host memory were asked for, and 1\.0 MiB are free"):
        slots_for("1GiB", BLOCK)
    asked = EngineOptions(kv_offloading_size="64KiB")
    with pytest.raises(UsageError, match="states of recurrent layers"):
        host_memory(filled(FP8), BLOCK, asked, ranks=1, recurrent=True)
    with pytest.raises(UsageError, match="each of 2 ranks has a part of a block"):
        host_memory(filled(FP8), BLOCK, asked, ranks=2, recurrent=False)


def test_the_report_says_how_much_there_is():
    (line,) = [note for note in with_host(False, 16).engine.notes if "offloading" in note]
    assert line.startswith("key-value cache offloading: 16 blocks in host memory, 64.0 KiB; on a CPU")
