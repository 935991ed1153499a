"""The decode fusions on a GPU, where they are on: counts, tokens, and logits in bfloat16."""

from __future__ import annotations

import pytest
import torch

import graft
from graft.models.load import load_model
from graft.models.registry import families
from graft.passes.config import load_config

NEW = 16
LENGTHS = (1, 5, 13, 30)
DECODE = [name for name, settings in load_config().transforms.items() if hasattr(settings, "devices")]
# routers that compute in float32 cast their weights, unless the model is in float32: plain linear layers then
ROUTERS = {"deepseek-v2": 1, "deepseek-v3": 1}
OFF = {"transforms": {name: {"enabled": False} for name in DECODE}}


def prompts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 128, (n,), generator=generator).tolist() for n in LENGTHS]


def tokens(llm):
    """Greedy, a mixed batch: prompts of several lengths that end at different steps."""
    params = [graft.SamplingParams(max_tokens=NEW - i, ignore_eos=True) for i in range(len(LENGTHS))]
    return [output.token_ids for output in llm.generate(prompts(), params)]


@pytest.mark.parametrize("family", sorted(families()))
def test_counts_and_greedy_tokens_on_a_gpu(family):
    model = load_model(f"tiny-{family}", dtype="float32", device="cuda")
    fused, plain = graft.LLM(model, kv_cache_memory="64MiB"), graft.LLM(model, config=OFF, kv_cache_memory="64MiB")
    expected = dict(model.family.expected_matches(model.layers, gpu=True))
    expected["dispatch_linear"] += ROUTERS.get(family, 0)
    records = fused.report.transforms
    assert {n: len(records[n].matches) for n in DECODE} == {n: expected[n] for n in DECODE}
    assert all(r.matches or r.reason or r.status == "disabled" for r in (records[name] for name in DECODE))
    assert tokens(fused) == tokens(plain)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tables_hold_what_the_gpu_computes(dtype):
    """Bitwise, at the real context of a model with scaled frequencies; the transform itself compares, or refuses."""
    model = load_model("llama-3.2-1b", dtype=dtype, device="cuda")
    report = graft.LLM(model, kv_cache_memory="64MiB").report
    (match,) = report.transforms["tabulate_rope"].matches
    assert match.pattern.startswith("2 tables of [131072, 64]")


@pytest.mark.parametrize("family", ["llama", "phi-3", "gemma-3", "qwen3-moe", "cohere"])
def test_bfloat16_logits_stay_close(family):
    """First-token logits with and without the fusions, relative to their spread; another prompt would be far off."""
    model = load_model(f"tiny-{family}", dtype="bfloat16", device="cuda")
    prompt = prompts()[-1]

    def logits(config, given):
        llm = graft.LLM(model, config=config, kv_cache_memory="64MiB")
        seen = []
        run = llm.engine.run
        llm.engine.run = lambda *args: seen.append(run(*args)) or seen[-1]
        llm.generate([given], graft.SamplingParams(max_tokens=1))
        return seen[0][0].float()

    plain, fused, other = logits(OFF, prompt), logits(None, prompt), logits(None, prompt[:-1])
    assert (fused - plain).abs().max() / plain.std() < 0.15
    assert (other - plain).abs().max() / plain.std() > 0.5
