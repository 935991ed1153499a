"""Sampling on a GPU: the tokens that the CPU samples from the same logits and seeds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from graft.base.errors import LogitsError
from graft.engine.params import SamplingParams
from graft.engine.sampling.sampling import make_generator, sample

DEVICE = "cuda"
KINDS = [
    SamplingParams(),
    SamplingParams(temperature=0.8, logprobs=3),
    SamplingParams(temperature=1.2, top_k=40),
    SamplingParams(temperature=0.9, top_p=0.9, logprobs=0),
    SamplingParams(temperature=3.0, top_p=0.99),  # a nucleus larger than the head that is looked at first
    SamplingParams(temperature=1.0, min_p=0.05, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
    SamplingParams(min_tokens=9, stop_token_ids=(7,), repetition_penalty=1.2),
]


def requests():
    return [
        SimpleNamespace(params=params, prompt=[1, 2, 3], new_tokens=[3, 4, 4], generator=make_generator(seed))
        for seed, params in enumerate(KINDS * 3)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_draws_the_tokens_of_the_cpu(dtype):
    logits = (torch.randn(3 * len(KINDS), 50_000, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    expected = sample(logits, requests(), frozenset({2}))
    got = sample(logits.to(DEVICE), requests(), frozenset({2}))
    assert [c.token for c in got] == [c.token for c in expected]
    for one, other in zip(got, expected, strict=True):
        if one.logprobs is not None and other.logprobs is not None:
            assert one.logprobs[one.token].logprob == pytest.approx(other.logprobs[other.token].logprob, abs=1e-3)
    alone = [sample(logits[i : i + 1].to(DEVICE), [r], frozenset({2}))[0].token for i, r in enumerate(requests())]
    assert alone == [c.token for c in got]


def test_bad_logits_are_an_error_on_a_gpu_too():
    logits = torch.zeros(len(KINDS), 100, device=DEVICE)
    logits[2, 5] = float("nan")
    told = sample(logits, requests()[: len(KINDS)])
    assert [row for row, choice in enumerate(told) if isinstance(choice.error, LogitsError)] == [2]
