"""The real embedded model, from its package to the words it writes."""

from __future__ import annotations

import pytest
import torch

import graft
from conftest import embedded
from marks import left_out

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time, in a small village,",
    "Water boils at",
    "The three laws of robotics are: first, a robot may not injure a human being; second,",
]


@pytest.fixture(scope="module")
def llm():
    return embedded()


@pytest.mark.exhaustive  # the short run: on every kind of tiny model
def test_every_transform_matches_or_says_why(llm):
    eager = graft.LLM(llm.model, backend="eager")
    records = eager.report.transforms
    counts = {name: len(r.matches) for name, r in records.items()}
    assert counts == eager.model.family.expected_matches(30)
    assert sum(count > 0 for count in counts.values()) == 8
    assert all(r.matches or r.reason or r.status == "disabled" for r in records.values())


def test_it_says_paris(llm):
    (output,) = llm.generate("The capital of France is", graft.SamplingParams(max_tokens=8))
    assert "Paris" in output.text


@pytest.mark.parametrize(("prompts", "tokens"), [(3, 16), left_out((5, 64))])
def test_greedy_tokens_equal_hugging_face(llm, prompts, tokens):
    """Prompts of different lengths in one batch."""
    outputs = llm.generate(PROMPTS[:prompts], graft.SamplingParams(max_tokens=tokens))
    for prompt, output in zip(PROMPTS[:prompts], outputs, strict=True):
        encoded = llm.tokenizer(prompt, return_tensors="pt")
        with torch.no_grad():
            expected = llm.model.module.generate(**encoded, max_new_tokens=tokens, do_sample=False)
        assert output.token_ids == expected[0, encoded["input_ids"].shape[1] :].tolist(), prompt


@pytest.mark.exhaustive  # the short run: with a stop string, in test_engine.py
def test_streamed_pieces_are_the_text(llm):
    params = graft.SamplingParams(max_tokens=24)
    (output,) = llm.generate("Hello! 你好，", params)
    assert "".join(llm.stream("Hello! 你好，", params)) == output.text


def test_chat_template_is_there(llm):
    assert llm.tokenizer.chat_template and "<|im_start|>" in llm.tokenizer.chat_template
