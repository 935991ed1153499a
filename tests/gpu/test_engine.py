"""The engine on a GPU: the tokens of Hugging Face on the same device."""

from __future__ import annotations

import pytest
import torch

import graft
from graft.models.load import load_model
from graft.models.registry import families

NEW = 24


def prompts(lengths):
    g = torch.Generator().manual_seed(0)
    return [torch.randint(3, 128, (n,), generator=g).tolist() for n in lengths]


@pytest.mark.parametrize("family", sorted(families()))
def test_greedy_tokens_equal_hugging_face_float32(family):
    model = load_model(f"tiny-{family}", dtype="float32", device="cuda")
    given = prompts((1, 5, 13, 30))
    expected = []
    for prompt in given:
        ids = torch.tensor([prompt], device="cuda")
        out = model.module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=-1,
        )
        expected.append(out[0, len(prompt) :].tolist())
    llm = graft.LLM(model)
    got = llm.generate(given, graft.SamplingParams(max_tokens=NEW, ignore_eos=True))
    assert [o.token_ids for o in got] == expected
    assert llm.report.kernels["graft::paged_attention"] == "triton"


@pytest.mark.parametrize("family", ["llama", "gemma-2", "gemma-3", "olmo-2", "qwen3-moe"])
def test_bfloat16_logits_stay_close_to_hugging_face(family):
    """First-token logits of a prompt, in bfloat16, relative to their spread; a wrong position would be far off."""
    model = load_model(f"tiny-{family}", dtype="bfloat16", device="cuda")
    (prompt,) = prompts((19,))
    ids = torch.tensor([prompt], device="cuda")
    with torch.no_grad():
        expected = model.module(ids).logits[0, -1].float()
        shifted = model.module(ids[:, :-1]).logits[0, -1].float()
    llm = graft.LLM(model)
    seen = []
    advance = llm.engine.advance
    llm.engine.advance = lambda requests, counts, logits: (seen.append(logits), advance(requests, counts, logits))[1]
    llm.generate([prompt], graft.SamplingParams(max_tokens=1))
    error = (seen[0][0].float() - expected).abs().max() / expected.std()
    assert error < 0.15
    assert (seen[0][0].float() - shifted).abs().max() / expected.std() > 0.5
