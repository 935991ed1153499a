"""Events of the key-value cache by callback, while an engine decodes by CUDA graphs."""

from __future__ import annotations

import pytest
import torch

import graft
from graft.engine.kv.view import CacheView

GREEDY = graft.SamplingParams(max_tokens=20, ignore_eos=True)


def engine(device):
    return graft.LLM("tiny-llama", dtype="float32", device=device, kv_cache_memory="16MiB", max_num_seqs=4)


def test_a_callback_hears_all_that_a_poller_reads(device):
    llm, told = engine(device), []
    assert (llm.engine.loop is not None) == (device == "cuda")
    prompts = [[3 + i % 97 for i in range(40)] + [tail] for tail in (5, 6, 7)]
    plain = [output.token_ids for output in llm.generate(prompts, GREEDY)]
    llm.kv_cache_events()
    with llm.on_kv_cache_events(told.extend):
        outputs = llm.generate([[9, 8, 7] * 20, *prompts], GREEDY)
    polled, view = llm.kv_cache_events(), CacheView()
    for event in told:
        view.apply(event)
    assert [output.token_ids for output in outputs[1:]] == plain  # events change nothing about the tokens
    assert set(view.blocks) == set(llm.engine.manager.stored) and len(view.blocks) > 6
    kinds = [type(event).__name__ for event in told]
    assert kinds[0] == "Created" and polled and kinds[-len(polled) :] == [type(event).__name__ for event in polled]
    heard = len(told)
    llm.generate([[1, 2, 3]], GREEDY)
    assert len(told) == heard  # closed


def test_what_a_callback_raises_ends_it_and_not_the_engine(device):
    llm = engine(device)

    def broken(events):
        raise ValueError("no such dashboard")

    subscription = llm.on_kv_cache_events(broken)
    (output,) = llm.generate([[3, 4, 5]], GREEDY)
    assert len(output.token_ids) == 20
    with pytest.raises(ValueError, match="no such dashboard"):
        subscription.close()


def test_a_callback_on_the_device_does_not_disturb_the_stream(device):
    """It runs in a thread of its own, and may use the device."""
    llm, sums = engine(device), []
    plain = [output.token_ids for output in llm.generate([[3, 4, 5], [7, 8]], GREEDY)]
    with llm.on_kv_cache_events(lambda events: sums.append(torch.ones(len(events), device=device).sum().item())):
        assert [output.token_ids for output in llm.generate([[3, 4, 5], [7, 8]], GREEDY)] == plain
    assert sum(sums) >= 1
