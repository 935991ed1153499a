"""LLM(kv_cache_dtype="fp8"): tokens and logits; blocks shared, copied and taken away; sizes, checks and errors."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

import graft
from conftest import resized, tiny
from graft.base.errors import CacheNotNative, DecodeMismatch, NoFloat8, UsageError
from graft.bench.bench import cache_need
from graft.bench.limits.traffic import cache_bytes_per_token
from graft.bench.plan import BenchPlan
from graft.cli.app import app
from graft.engine.kv.moves import Copy
from graft.engine.kv.tensors import LayerShape, allocate, bytes_per_block, copy_blocks
from graft.engine.setup.cache_error import cache_error
from graft.engine.setup.self_check import tolerance
from graft.ops.paged_cache import raw, read, scales_of, write
from graft.weights.quantize import FP8

CPU = torch.device("cpu")
# of a number that is rounded to 3 bits behind the first, at most; keys and values of two layers, one after the other
ROUNDING = 2.0**-4 * 2**0.5
GREEDY = graft.SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    return graft.LLM(tiny("llama"), kv_cache_dtype="fp8", max_num_seqs=4)


def without_scales(cache, blocks, dtype):
    """A wrong way to read a cache."""
    return read(cache, blocks, dtype) / scales_of(cache).index_select(0, blocks).transpose(1, 2)[..., None].to(dtype)


def test_logits_differ_by_what_rounding_explains(llm):
    tokens = list(range(3, 17))
    error, _ = cache_error(llm.engine, tokens, torch.float32)
    assert 1e-3 < error < ROUNDING
    with mock.patch("graft.ops.cached_attention.reference.read", without_scales):
        assert cache_error(llm.engine, tokens, torch.float32)[0] > 2 * ROUNDING


@pytest.mark.some(1)
@pytest.mark.parametrize("family", ["gpt2", "qwen3", "gemma-3", "mixtral"])
def test_other_families_decode_as_a_full_pass_does(family):
    """Without rotation, with norms, with windows, with experts: the check at load raises where they do not."""
    other = graft.LLM(tiny(family), kv_cache_dtype="fp8", max_num_seqs=2)
    assert any(tensor.dtype is FP8 for tensor in other.engine.tensors)
    assert any("decode steps agree" in note for note in other.report.notes)
    assert len(other.generate([[5, 6, 7]], GREEDY)[0].token_ids) == 12


def test_tokens_are_the_same_however_a_prompt_comes_into_the_cache(llm):
    """At once, in chunks, from blocks of an equal prompt, after its blocks were taken away, beside others."""
    prompts = [[(7 * i + j) % 120 for j in range(30)] for i in range(3)]
    expected = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
    again = llm.generate(prompts, GREEDY)
    assert [output.token_ids for output in again] == expected and all(output.cached_tokens for output in again)
    block = bytes_per_block(llm.cache.layers, 16)
    for options in (
        {"max_num_batched_tokens": 16},
        {"enable_prefix_caching": False},
        {"kv_cache_memory": 8 * block, "enable_prefix_caching": False, "admission": "greedy"},
    ):
        other = resized(llm, **options)
        outputs = other.generate(prompts, GREEDY)
        assert [output.token_ids for output in outputs] == expected, options
    assert other.stats.preemptions


def test_siblings_share_blocks_and_part_with_their_scales(llm):
    params = graft.SamplingParams(max_tokens=9, temperature=1.0, n=3, seed=1, ignore_eos=True)
    together = llm.generate([list(range(5, 25))], params)[0]
    alone = [
        llm.generate([list(range(5, 25))], graft.SamplingParams(max_tokens=9, temperature=1.0, seed=seed))[0]
        for seed in (1, 2, 3)
    ]
    found = [together.token_ids, *(other.token_ids for other in together.alternatives)]
    assert found == [output.token_ids for output in alone]


def test_a_block_is_copied_with_its_scales():
    tensors = allocate([LayerShape(2, 8, FP8)], 6, 4, CPU)
    assert tensors[0].shape == (6, 6, 2, 8) and not any(raw(t).any() for t in tensors)
    for tensor in tensors:
        write(tensor, torch.arange(24), torch.randn(24, 2, 8))
    before = [read(t, torch.arange(6), torch.float32) for t in tensors]
    copy_blocks(tensors, [Copy(1, 4), Copy(0, 5), Copy(1, 2)])
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(read(tensor, torch.arange(6), torch.float32), old[[0, 1, 1, 3, 1, 0]])


@pytest.mark.exhaustive
def test_almost_twice_as_many_tokens_fit():
    """Of the 8B model: 128 numbers and a scale of 4 bytes a head, and half a row of each block that is not used."""
    wide, narrow = ([LayerShape(8, 128, dtype)] * 32 for dtype in (torch.bfloat16, FP8))
    assert bytes_per_block(wide, 16) / bytes_per_block(narrow, 16) == pytest.approx(2 * 16 / 17)
    small = graft.LLM(tiny("llama"), kv_cache_dtype="fp8", kv_cache_memory=64 << 10)
    same = graft.LLM(tiny("llama"), kv_cache_memory=64 << 10, backend="eager")
    ratio = bytes_per_block(same.cache.layers, 16) / bytes_per_block(small.cache.layers, 16)
    assert small.engine.manager.blocks == int(same.engine.manager.blocks * ratio) > 2 * same.engine.manager.blocks
    assert small.engine.cache_bytes <= 64 << 10
    roots = {each.kv_cache_events()[0].root for each in (small, same)}
    assert len(roots) == 2  # blocks that round are no blocks of others


def test_the_report_says_it(llm):
    notes = "\n".join(llm.report.notes)
    assert "backend: eager, because native kernels have no torch.float8_e4m3fn key-value cache" in notes
    assert "logits over the float8_e4m3fn cache are " in notes and "from those over one in float32" in notes
    assert "float8_e4m3fn with a scale a token and head, 96 bytes a token and not 256" in notes
    plain = graft.LLM(tiny("llama"), max_num_seqs=2, backend="eager")
    assert "float8" not in "\n".join(plain.report.notes)


def test_the_self_check_sees_a_scale_that_a_decode_step_loses():
    def careless(cache, slots, heads):
        write(cache, slots, heads)
        if len(slots) == 1:
            scales_of(cache)[slots // 16, :, slots % 16] *= 1.25

    with (
        mock.patch("graft.ops.paged_attention.reference.write", careless),
        pytest.raises(DecodeMismatch, match=r"the keys of model\.layers\.0"),
    ):
        graft.LLM(tiny("llama"), kv_cache_dtype="fp8", max_num_seqs=2)


def test_the_tolerance_of_the_self_check_knows_of_float8():
    assert tolerance(torch.float32) < 1e-3 < tolerance(torch.float32, float8_cache=True) < 1e-2
    assert 0.05 < tolerance(torch.bfloat16, layer=28, float8_cache=True) < 0.2
    assert tolerance(torch.bfloat16, True, 28, True) == tolerance(torch.bfloat16, True, 28)


def test_bench_counts_the_bytes_of_the_cache(llm):
    module = llm.model.module
    assert cache_bytes_per_token(module) == 2 * 2 * 8 * 4
    assert cache_bytes_per_token(module, llm.engine.tensors[0].dtype) == 2 * 2 * (8 + 4)
    plan = BenchPlan((2,), (40,), 8, 1)
    assert cache_need(llm.model, plan, "fp8") * 8 * 4 == cache_need(llm.model, plan) * (8 + 4)


@pytest.mark.parametrize("asked", ["fp4", "float8", 8, None])
def test_an_unknown_dtype_is_told_before_anything_is_loaded(asked):
    with pytest.raises(UsageError, match=r"unknown kv_cache_dtype .* Known: auto, fp8"):
        graft.LLM("no such model", kv_cache_dtype=asked)


def test_native_kernels_and_devices_without_float8_refuse():
    with pytest.raises(CacheNotNative, match=r"not supported by the native kernels.*leave out backend='native'"):
        graft.LLM(tiny("llama"), kv_cache_dtype="fp8", backend="native")
    old = "compute capability 8.0 has no float8 (e4m3) numbers"
    with (
        mock.patch("graft.engine.setup.stages.float8_missing", lambda _: old),
        pytest.raises(NoFloat8, match=r"cannot be had on cpu: compute capability 8\.0"),
    ):
        graft.LLM(tiny("llama"), kv_cache_dtype="fp8")


@pytest.mark.exhaustive
def test_the_command_line_takes_it():
    run = ["run", "--model", "tiny-llama", "--token-ids", "5,6,7", "--max-tokens", "4", "--kv-cache-dtype"]
    found = CliRunner().invoke(app, [*run, "fp8", "--json"])
    assert found.exit_code == 0 and "float8_e4m3fn" in found.output
    wrong = CliRunner().invoke(app, [*run, "fp16"])
    assert wrong.exit_code != 0 and "unknown kv_cache_dtype 'fp16'" in wrong.output + str(wrong.exception)
