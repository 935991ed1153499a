"""Recorded decode steps: their sizes, the options that name them, where they are off and why."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import graft
from capture_cases import captured, engine
from graft.base.errors import UsageError
from graft.engine.decode import buckets
from graft.engine.decode.buckets import BatchSizes, bucket_for, bucket_sizes, table_widths
from graft.engine.decode.build import loop_problem
from graft.engine.options import EngineOptions


def test_bucket_sizes():
    assert bucket_sizes(1) == (1,) and bucket_sizes(8) == (1, 2, 4, 8)
    assert bucket_sizes(21) == (1, 2, 4, 8, 16, 18, 20, 21) and bucket_sizes(20, [8, 3, 8]) == (3, 8)
    assert (
        bucket_sizes(100_000)[-1] == buckets.MOST_ROWS
        and bucket_sizes(1024)[-3:] == (896, 960, 1024)
        and bucket_sizes(600, [600]) == (600,)
    )
    assert BatchSizes(bucket_sizes(21), 2).used == (1, 2, 4, 8, 16, 21)
    assert [bucket_for(n, (1, 2, 4)) for n in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, None]


def test_a_size_between_is_used_when_it_has_been_wanted_often():
    sizes = BatchSizes(bucket_sizes(64), 3)
    assert [sizes.take(18) for _ in range(4)] == [32, 32, 18, 18]
    assert sizes.take(17) == 18 and sizes.take(19) == 32 and sizes.take(64) == 64 and sizes.take(65) is None
    assert BatchSizes((3, 24), 3, (3, 24)).take(4) == 24
    assert BatchSizes((), 3).take(1) is None


@pytest.mark.parametrize("most", [17, 256, 1000, 4096])
def test_few_rows_are_padding(most):
    sizes = bucket_sizes(most)
    assert sizes == tuple(sorted(set(sizes))) and sizes[-1] == most
    assert max((bucket_for(n, sizes) - n) / bucket_for(n, sizes) for n in range(16, most + 1)) < 1 / 9


def test_options():
    for wrong, message in (
        ({"enforce_eager": 1}, "enforce_eager must be True or False"),
        ({"cudagraph_capture_sizes": []}, "must be a list of whole numbers of at least 1"),
        ({"cudagraph_capture_sizes": [0]}, "must be a list of whole numbers of at least 1"),
        ({"cudagraph_capture_sizes": 4}, "must be a list of whole numbers of at least 1"),
        ({"cudagraph_capture_sizes": [9], "max_num_seqs": 8}, "no more than max_num_seqs=8"),
        ({"cudagraph_capture_sizes": [1], "enforce_eager": True}, "contradict"),
    ):
        with pytest.raises(UsageError, match=message):
            graft.LLM("tiny-llama", **wrong)


def test_a_cpu_engine_says_that_it_records_nothing():
    assert "decode: no CUDA graphs, because the model is on cpu" in captured("llama").report.notes
    assert captured("llama").engine.loop is None


def test_where_captures_are_off_and_why():
    cuda, options = torch.device("cuda"), EngineOptions()
    assert loop_problem(cuda, "eager", options) is None
    assert "'inductor'" in loop_problem(cuda, "inductor", options)
    assert "enforce_eager" in loop_problem(cuda, "eager", EngineOptions(enforce_eager=True))
    assert loop_problem(torch.device("cpu"), "eager", options) == "the model is on cpu"


def test_capturing_shows_its_progress():
    told = []
    captures = engine("llama", True, max_num_seqs=1).engine.loop.captures
    captures.made.clear()
    captures.make_all((1,), lambda *what: told.append(what))
    assert told == [("capturing CUDA graphs", 0, 1), ("capturing CUDA graphs", 1, 1)]


def test_few_rows_of_short_contexts_have_captures_of_their_own():
    assert table_widths(8, 8192, 16) == (128, 8192) and table_widths(129, 8192, 16) == (8192,)
    assert table_widths(1, 100, 16) == (100,)
    captures = engine("llama", True, max_num_seqs=2).engine.loop.captures
    widest = captures.buffers.block_tables.shape[1]
    with mock.patch.object(buckets, "SHORT", 32):
        assert captures.key(1, 32, "greedy") == (1, 2, "greedy")
        assert captures.key(1, 33, "greedy") == (1, widest, "greedy")


def test_a_context_grows_from_one_capture_into_the_next():
    """Tokens stay those of the synchronous engine when the table becomes wider in mid-text."""
    given = [list(range(3, 23)), list(range(40, 70))]
    params = graft.SamplingParams(max_tokens=40, ignore_eos=True)
    expected = [o.token_ids for o in engine("llama", False).generate(given, params)]
    with mock.patch.object(buckets, "SHORT", 48):
        llm = engine("llama", True, max_num_seqs=2)
        assert [o.token_ids for o in llm.generate(given, params)] == expected
        used = {width for rows, width, _ in llm.engine.loop.captures.made if rows == 2}
    assert used == {3, llm.engine.loop.buffers.block_tables.shape[1]}
    assert not llm.stats.bucket_misses and llm.stats.steps_ahead > 30


@pytest.mark.parametrize(("memory", "tokens"), [(80 << 30, 8192), (24 << 30, 2048)])
def test_a_large_gpu_takes_more_tokens_a_step(memory, tokens):
    found = mock.Mock(total_memory=memory)
    with mock.patch.object(torch.cuda, "get_device_properties", lambda _: found):
        assert EngineOptions().tokens_of_a_step(torch.device("cuda")) == tokens
        assert EngineOptions(max_num_batched_tokens=100).tokens_of_a_step(torch.device("cuda")) == 100
    assert EngineOptions().tokens_of_a_step(torch.device("cpu")) == 2048


def test_requests_at_once_follow_the_room_of_the_cache():
    """A power of two of short requests; what was asked for stays, and sizes to capture are asked for."""
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    auto = EngineOptions()
    assert [auto.requests_at_once(gpu, tokens) for tokens in (None, 10**6, 90_000, 300, 1)] == [1024, 1024, 256, 1, 1]
    assert [auto.requests_at_once(cpu, tokens) for tokens in (None, 300)] == [256, 256]
    assert EngineOptions(max_num_seqs=7).requests_at_once(gpu, 10**6) == 7
    assert EngineOptions(cudagraph_capture_sizes=[1, 48]).requests_at_once(gpu, 300) == 48
    with pytest.raises(UsageError, match="max_num_batched_tokens must be a whole number of at least 1, but is 0"):
        EngineOptions(max_num_batched_tokens=0)
