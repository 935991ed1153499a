"""Logprobs of prompts against the model's own, and biases of logits."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graft
from capture_cases import engine
from graft.base.errors import UsageError
from graft.engine import scheduler
from graft.engine.params import SamplingParams
from graft.engine.sampling.sampling import sample
from sampling_cases import request

FAR = 1e-4


def expected(llm, prompt):
    """[len - 1]: how likely the model itself holds each token behind the first."""
    with torch.no_grad():
        logits = llm.model.module(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    return [logits[at, token].item() for at, token in enumerate(prompt[1:])]


def scores(output):
    """Of the prompt's own tokens."""
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(output.prompt_token_ids)
    pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return [each[token].logprob for token, each in pairs]


def prompts(*lengths):
    source = random.Random(3)
    return [[source.randrange(128) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 7}, {"blocks": 6, "max_num_batched_tokens": 16}])
def test_they_are_those_of_the_model_in_chunks_and_in_company(record, options, monkeypatch):
    monkeypatch.setattr(scheduler, "SCORED", 5)  # a step scores no more: chunks of their own
    llm = engine("llama", record, **options)
    asked = prompts(1, 2, 19, 33, 40)
    plain = SamplingParams(max_tokens=6, ignore_eos=True)
    scored = SamplingParams(max_tokens=6, ignore_eos=True, prompt_logprobs=2)
    before = llm.generate(asked, plain)  # its blocks can be found, and must not be
    found = llm.generate([*asked, *asked], [scored] * 5 + [plain] * 5)
    for prompt, one, other, third in zip(asked, found[:5], found[5:], before, strict=True):
        assert one.token_ids == other.token_ids == third.token_ids and other.prompt_logprobs is None
        assert scores(one) == pytest.approx(expected(llm, prompt), abs=FAR)
        assert all(2 <= len(each) <= 3 for each in one.prompt_logprobs[1:])
        if len(prompt) > 2:  # a tolerance that would take those of the token beside is none
            assert scores(one)[1:] != pytest.approx(expected(llm, prompt)[:-1], abs=FAR)
    assert llm.engine.idle and llm.engine.manager.available == llm.engine.manager.blocks


def test_samples_of_a_prompt_share_them_and_later_prompts_are_found_again():
    llm = engine("llama", True)
    (prompt,) = prompts(40)
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=3, prompt_logprobs=0)
    (output,) = llm.generate(prompt, params)
    for one in (output, *output.alternatives):
        assert scores(one) == pytest.approx(expected(llm, prompt), abs=FAR)
    assert all(len(each) == 1 for each in output.prompt_logprobs[1:])
    assert output.cached_tokens == 0
    assert llm.generate(prompt)[0].cached_tokens > 0
    assert output.to_json()["prompt_logprobs"][0] is None


def test_a_step_keeps_few_logits():
    llm = engine("llama", False)
    seen = []
    graph = llm.engine.graph

    def counted(*inputs):
        (logits,) = graph(*inputs)
        seen.append(logits.shape[1])
        return (logits,)

    llm.engine.graph = counted
    llm.generate(prompts(100, 100), SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert max(seen) <= scheduler.SCORED + 2 and sum(seen) >= 198


@given(st.dictionaries(st.integers(0, 14), st.floats(-100, 100), max_size=5), st.booleans())
def test_a_bias_is_added_and_nothing_else(biases, greedy):
    logits = torch.randn(3, 15, generator=torch.Generator().manual_seed(7))
    params = SamplingParams(temperature=0.0 if greedy else 0.8, logit_bias=biases)
    plain = SamplingParams(temperature=params.temperature)
    moved = logits.clone()
    for token, much in biases.items():
        moved[1, token] += much

    def sampled(rows, *each):
        return [one.token for one in sample(rows, [request(params, seed=row) for row, params in enumerate(each)])]

    assert sampled(logits, plain, params, plain) == sampled(moved, plain, plain, plain)


def test_a_bias_in_the_engine():
    for record in (True, False):
        llm = engine("llama", record)
        (prompt,) = prompts(9)
        plain, forced = llm.generate(
            [prompt, prompt], [SamplingParams(max_tokens=6), SamplingParams(max_tokens=6, logit_bias={77: 100})]
        )
        assert forced.token_ids == [77] * 6 and plain.token_ids != forced.token_ids
        never = llm.generate(prompt, SamplingParams(max_tokens=6, logit_bias=dict.fromkeys(plain.token_ids, -100)))[0]
        assert not set(never.token_ids) & set(plain.token_ids)
        with pytest.raises(UsageError, match="token id 128 is outside the vocabulary of 128"):
            llm.generate(prompt, SamplingParams(logit_bias={128: 1}))


@pytest.mark.parametrize("bias", [{-1: 1}, {1: 101}, {1: float("nan")}, {1: "x"}, {"1": 1}, [1, 2], 5, {True: 1}])
def test_biases_that_cannot_be_meant(bias):
    with pytest.raises(UsageError, match="logit_bias"):
        SamplingParams(logit_bias=bias)
    assert graft.SamplingParams(logit_bias=None).biases == ()
    assert graft.SamplingParams(logit_bias=[[3, 1.5]]) == graft.SamplingParams(logit_bias={3: 1.5})
