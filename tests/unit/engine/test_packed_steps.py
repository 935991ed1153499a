"""Steps with prompts in them, padded to a number of tokens that is captured."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import graft
from capture_cases import engine
from graft.engine.decode.buckets import BatchSizes
from graft.engine.decode.packed import LARGEST, largest_step, token_sizes
from graft.engine.kv.manager import BlockManager
from graft.engine.scheduler import Scheduler
from graft.ops.layout import NAMES, HostBatch
from marks import short

PROMPTS = [[i * 7 % 120 + 1 for i in range(count)] for count in (1, 3, 16, 17, 40, 63)]


def test_the_numbers_of_tokens():
    sizes = token_sizes(LARGEST)
    assert sizes[:6] == (16, 20, 24, 28, 32, 40) and sizes[-1] == LARGEST
    assert not any(size % 2 for size in sizes)  # rows are odd
    assert max((b - a - 1) / b for a, b in pairwise(sizes)) < 0.2
    assert token_sizes(20) == (16, 20) and token_sizes(15) == ()


@pytest.mark.parametrize(
    ("seqs", "most", "beside", "largest"),
    [
        (1024, 8192, None, 2048), (1024, 8192, 2048, 3072), (1024, 8192, 8192, 4096), (16, 8192, 512, 2048),
        (1024, 512, None, 512), (1024, 2500, 2048, 2500),
    ],
)  # fmt: skip
def test_a_full_step_of_both_is_captured_where_prompts_are_bounded(seqs, most, beside, largest):
    assert largest_step(Scheduler(BlockManager(4, 16), seqs, most, beside)) == largest


def test_tokens_are_the_same_however_many_of_prompts_a_step_takes():
    params = [graft.SamplingParams(max_tokens=4 + i, ignore_eos=True) for i in range(len(PROMPTS))]
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    found = [
        engine("llama", record, **options, max_mixed_prefill_tokens=beside).generate(PROMPTS, params)
        for record, beside in ((False, None), (False, 7), (True, 7))
    ]
    assert [o.token_ids for o in found[0]] == [o.token_ids for o in found[1]] == [o.token_ids for o in found[2]]


@pytest.mark.some(1)
@pytest.mark.parametrize("family", short(["llama", "gemma-2", "gpt2", "qwen3-moe"], "llama", "qwen3-moe"))
def test_padded_steps_give_what_launched_ones_do(family):
    """Prompts in chunks beside sequences that decode; the requests come and go at different times."""
    params = [graft.SamplingParams(max_tokens=4 + i, ignore_eos=True, logprobs=2) for i in range(len(PROMPTS))]
    found = []
    for record in (True, False):
        llm = engine(family, record, max_num_seqs=4, max_num_batched_tokens=32)
        found.append(llm.generate(PROMPTS, params))
    packed = engine(family, True, max_num_seqs=4, max_num_batched_tokens=32).engine.loop.packed
    assert packed.rows == 5
    for one, other in zip(*found, strict=True):
        assert one.token_ids == other.token_ids
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            for token, value in theirs.items():
                assert abs(mine[token].logprob - value.logprob) < 2e-4


def test_what_is_captured_is_told_and_used_again():
    llm = engine("llama", True, max_num_seqs=4, max_num_batched_tokens=64)
    packed = llm.engine.loop.packed
    assert packed.notes == []
    for turn in range(5):
        llm.generate([[turn + 1, 2, 3], [turn + 4] * 20], graft.SamplingParams(max_tokens=2, ignore_eos=True))
        # 23 tokens: the next power of two at once, the nearest size when it has been wanted four times
        assert set(packed.made) == ({32} if turn < 3 else {24, 32})
    assert any("prompts: 2 captured steps" in note and "steps of 24, 32 tokens" in note for note in llm.report.notes)


def test_a_step_of_more_tokens_is_launched(monkeypatch):
    llm = engine("llama", True, max_num_seqs=4, max_num_batched_tokens=64)
    monkeypatch.setattr(llm.engine.loop.packed, "sizes", BatchSizes((16,), 1))
    whole = llm.generate([[3] * 40], graft.SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids
    assert not llm.engine.loop.packed.made
    again = engine("llama", True, max_num_seqs=4, max_num_batched_tokens=64)
    assert again.generate([[3] * 40], graft.SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids == whole
    assert again.engine.loop.packed.made


def test_padding_touches_nobody_elses_blocks():
    """The cache beyond the padding block is what a step without padding writes."""
    caches = []
    for sizes in ((16, 20, 24), (64,)):
        llm = engine("llama", True, blocks=12, max_num_seqs=4, max_num_batched_tokens=64)
        llm.engine.loop.packed.sizes = BatchSizes(sizes, 1)
        llm.generate([[7] * 19], graft.SamplingParams(max_tokens=1, ignore_eos=True))
        caches.append([tensor[:12].clone() for tensor in llm.engine.tensors])
    for one, other in zip(*caches, strict=True):
        torch.testing.assert_close(one, other)
        assert one.abs().sum() > 0


def test_padding_of_more_tokens_than_a_table_has_blocks_for_takes_several_rows():
    """As with a short context: a row that were longer than its table would have blocks from behind it."""
    llm = engine("llama", True, max_num_seqs=2, max_num_batched_tokens=1024)
    packed = llm.engine.loop.packed
    assert packed.span == 256 and packed.spare == 4 and packed.rows == 7
    host = HostBatch()
    host.add([5], 0, [0], packed.block_size)
    padded = packed.padded(host, 640)
    counts = [b - a for a, b in pairwise(padded.cu_seqlens)]
    assert counts == [1, 0, 0, 256, 256, 127, 0] and max(padded.seq_lens) == packed.span
    assert padded.token_to_seq == [row for row, count in enumerate(counts) for _ in range(count)]
    assert padded.lens_cpu == [(count, max(count, 1)) for count in counts] and len(padded.slot_mapping) == 640
    packed.sizes = BatchSizes((1024,), 1)
    params = graft.SamplingParams(max_tokens=3, ignore_eos=True)
    whole = engine("llama", False, max_num_seqs=2).generate([[3] * 20], params)
    assert llm.generate([[3] * 20], params)[0].token_ids == whole[0].token_ids and set(packed.made) == {1024}


@pytest.mark.parametrize(
    ("seqs", "tokens", "room", "rows"),
    [(2, 600, 192, 2 + 4), (2, 600, 160, 2 + 4), (4, 64, 192, 4 + 1), (4, 64, 47, 4 + 2), (8, 5, 192, 4 + 1)],
)
def test_the_largest_step_is_padding_alone(seqs, tokens, room, rows):
    """It runs on a GPU before anybody asks, so that its kernels are there."""
    llm = engine("llama", True, blocks=12, max_num_seqs=seqs, max_num_batched_tokens=max(tokens, 64))
    before = [tensor.clone() for tensor in llm.engine.tensors]
    (logits,) = llm.engine.loop.packed.padding_step(tokens, 320, room)()
    assert logits.shape[1] == rows and logits.isfinite().all()
    for tensor, was in zip(llm.engine.tensors, before, strict=True):
        assert torch.equal(tensor[:12], was[:12]) and not torch.equal(tensor[12], was[12])


def test_the_layout_of_a_padded_step():
    packed = engine("llama", True, max_num_seqs=4, max_num_batched_tokens=64).engine.loop.packed
    host, size, rows, block = HostBatch(), 16, packed.rows, packed.block_size
    host.add([5], 9, [2], block)
    host.add([6, 7], 0, [1], block)
    padded = packed.padded(host, size)
    flat, at = padded.flat()
    assert len(flat) % 2 == 0 and all(place.start % 2 == 0 for place in at.values())  # each begins at 16 bytes
    assert set(at) == {*NAMES} - {"block_tables", "lens_cpu"}  # tables lie apart, sizes of the host on the host
    for name, place in at.items():
        assert flat[place] == getattr(padded, name), name
    assert padded.input_ids[:3] == [5, 6, 7] and padded.token_to_seq[3:] == [rows - 1] * 13
    assert {slot // block for slot in padded.slot_mapping[3:]} == {packed.padding}
    assert padded.position_ids[:3] == [9, 0, 1]
    assert padded.logits_indices[:2] == [0, 2] and padded.seq_lens == [10, 2, 1, 1, 13]
    assert padded.cu_seqlens == [0, 1, 3, 3, 3, 16]
    assert padded.lens_cpu == [(1, 10), (2, 2), (0, 1), (0, 1), (13, 13)]
