"""The engine on tiny models: the tokens of Hugging Face, whatever the batch, and clear errors."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import graft
from conftest import FAMILIES, resized, tiny
from graft.base.errors import (
    EmptyPrompt,
    EngineFailed,
    EngineStuck,
    LogitsError,
    OutOfCache,
    PromptTooLong,
    TokenizerMissing,
    UnknownBackend,
    UsageError,
)
from graft.models.load import load_model
from graft.ops.layout import NAMES, Batch
from marks import KINDS, examples, short

GREEDY = graft.SamplingParams(max_tokens=24, ignore_eos=True)


@cache
def engine(family: str) -> graft.LLM:
    """Native code for one family; test_native_families has it for the others, against this eager engine."""
    backend = "auto" if family == "llama" else "eager"
    return graft.LLM(f"tiny-{family}", dtype="float32", device="cpu", backend=backend)


def prompts(lengths, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 128, (n,), generator=g).tolist() for n in lengths]


def reference(family: str, prompt: list[int], new: int) -> list[int]:
    """Hugging Face's own greedy tokens."""
    ids = torch.tensor([prompt])
    out = tiny(family).module.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=-1
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.some(2)
@pytest.mark.parametrize("family", short(FAMILIES, *KINDS))
def test_greedy_tokens_equal_hugging_face_in_a_mixed_batch(family):
    """Prompts of different lengths together, longer than the sliding windows, decoded side by side."""
    given_prompts = prompts((1, 5, 13, 30))
    outputs = engine(family).generate(given_prompts, GREEDY)
    for prompt, output in zip(given_prompts, outputs, strict=True):
        assert output.token_ids == reference(family, prompt, 24)
        assert output.finish_reason == "length"
    seen = {token for output in outputs for token in output.token_ids}
    assert len(seen) > 4, "the tokens vary, so the test can fail"


@pytest.mark.parametrize("family", short(["llama", "gemma-2", "gemma-3"], "gemma-2"))
def test_chunked_prefill_gives_the_same_tokens(family):
    llm = engine(family)
    given_prompts = prompts((30, 7, 19))
    whole = [o.token_ids for o in llm.generate(given_prompts, GREEDY)]
    llm.engine.scheduler.max_num_batched_tokens = 8
    try:
        assert [o.token_ids for o in llm.generate(given_prompts, GREEDY)] == whole
    finally:
        llm.engine.scheduler.max_num_batched_tokens = 2048


@settings(max_examples=examples(10), deadline=None)
@given(st.lists(st.integers(1, 25), min_size=1, max_size=6), st.integers(1, 9), st.integers(2, 40))
def test_any_batch_gives_each_request_its_own_tokens(lengths, new, budget):
    """Alone or together, in one piece or in chunks: the same greedy tokens, and every block comes back."""
    llm = engine("mistral")  # windows without a soft cap: one sequence alone takes another way than several
    given_prompts = prompts(lengths, seed=sum(lengths))
    params = [graft.SamplingParams(max_tokens=new + i, ignore_eos=True) for i in range(len(lengths))]
    alone = [llm.generate([p], one)[0].token_ids for p, one in zip(given_prompts, params, strict=True)]
    llm.engine.scheduler.max_num_batched_tokens = max(budget, len(lengths))
    try:
        together = [o.token_ids for o in llm.generate(given_prompts, params)]
    finally:
        llm.engine.scheduler.max_num_batched_tokens = 2048
    assert together == alone
    assert llm.engine.manager.available == llm.engine.manager.blocks


def test_requests_wait_when_the_cache_is_small():
    whole = engine("llama").engine
    block = whole.cache_bytes // whole.manager.blocks
    llm = resized(engine("llama"), kv_cache_memory=4 * block)
    assert llm.engine.manager.blocks == 4  # of 16 tokens
    given_prompts = prompts((20, 25, 18, 30))
    outputs = llm.generate(given_prompts, GREEDY)
    assert [o.token_ids for o in outputs] == [reference("llama", p, 24) for p in given_prompts]
    with pytest.raises(OutOfCache, match="needs 6 blocks"):
        llm.generate(prompts((60,)), graft.SamplingParams(max_tokens=30))


def test_generation_stops_at_the_end_token():
    llm = engine("llama")
    (prompt,) = prompts((9,))
    free = llm.generate([prompt], GREEDY)[0].token_ids
    llm.engine.end_tokens, before = frozenset({free[5]}), llm.engine.end_tokens
    try:
        output = llm.generate([prompt], graft.SamplingParams(max_tokens=24))[0]
    finally:
        llm.engine.end_tokens = before
    assert output.finish_reason == "stop"
    assert output.token_ids == free[: free.index(free[5]) + 1]


def test_temperature_draws_with_the_requests_own_seed():
    llm = engine("llama")
    (prompt,) = prompts((6,))
    hot = graft.SamplingParams(max_tokens=12, temperature=1.5, seed=7, ignore_eos=True)
    first = llm.generate([prompt], hot)[0].token_ids
    assert llm.generate([prompt], hot)[0].token_ids == first
    in_batch = llm.generate([prompt, *prompts((4, 9), seed=1)], [hot, GREEDY, GREEDY])[0].token_ids
    assert in_batch == first
    other = graft.SamplingParams(max_tokens=12, temperature=1.5, seed=8, ignore_eos=True)
    assert llm.generate([prompt], other)[0].token_ids != first


def test_prompts_may_be_one_or_many():
    llm = engine("llama")
    assert len(llm.generate([3, 4, 5], GREEDY)) == 1
    assert len(llm.generate([[3, 4], (5, 6)], GREEDY)) == 2
    assert llm.generate([], GREEDY) == []
    ids = llm.generate([3, 4, 5], GREEDY)[0].token_ids
    for same in (
        torch.tensor([3, 4, 5]),
        np.array([3, 4, 5]),
        (3, 4, 5),
        [[np.int64(3), 4, 5]],
        torch.tensor([[3, 4, 5]]),
    ):
        assert [o.token_ids for o in llm.generate(same, GREEDY)] == [ids]


def test_clear_errors_for_bad_prompts():
    llm = engine("llama")
    with pytest.raises(TokenizerMissing, match="tiny-llama has no tokenizer"):
        llm.generate("some text", GREEDY)
    with pytest.raises(TokenizerMissing):
        next(llm.stream([3], GREEDY))
    with pytest.raises(PromptTooLong, match=r"250 tokens and 24 new ones .* context is 256"):
        llm.generate(prompts((250,)), GREEDY)
    with pytest.raises(EmptyPrompt):
        llm.generate([[]], GREEDY)
    with pytest.raises(UsageError, match="token id 128 is outside the vocabulary of 128"):
        llm.generate([[128]], GREEDY)
    with pytest.raises(UsageError, match="prompts: 2, sampling parameters: 1"):
        llm.generate([[3], [4]], [GREEDY])
    with pytest.raises(UsageError, match="max_tokens must be at least 1"):
        graft.SamplingParams(max_tokens=0)
    with pytest.raises(UsageError, match="temperature must be 0 or more"):
        graft.SamplingParams(temperature=float("nan"))
    with pytest.raises(UsageError, match="a prompt is text, bytes or token ids, not a dict"):
        llm.generate({"prompt_token_ids": [3]}, GREEDY)
    with pytest.raises(UsageError, match=r"sampling parameters are a graft\.SamplingParams, not a dict"):
        llm.generate([[3]], {"max_tokens": 3})
    with pytest.raises(UsageError, match="a priority is a whole number, not 'high'"):
        llm.generate([[3]], GREEDY, priority="high")
    assert "not a NoneType" in str(llm.generate([[3], None], GREEDY)[1].error)
    assert llm.generate([[3]], GREEDY), "the engine goes on after errors"


def test_the_engine_needs_its_transforms_and_a_known_backend():
    with pytest.raises(UsageError, match="needs the transform insert_kv_cache"):
        graft.LLM("tiny-llama", config={"transforms": {"insert_kv_cache": {"enabled": False}}})
    with pytest.raises(UnknownBackend, match="did you mean 'inductor'"):
        graft.LLM("tiny-llama", backend="inducter")


def test_without_any_fusion_the_tokens_are_the_same():
    off = {n: {"enabled": False} for n in ("fuse_rms_norm", "fuse_swiglu", "fuse_rope", "merge_qkv")}
    llm = graft.LLM("tiny-llama", dtype="float32", device="cpu", backend="eager", config={"transforms": off})
    (prompt,) = prompts((11,))
    assert llm.generate([prompt], GREEDY)[0].token_ids == reference("llama", prompt, 24)
    assert llm.report.transforms["fuse_rope"].status == "disabled"


def test_report_names_the_kernel_of_every_op():
    kernels = graft.LLM("tiny-llama", dtype="float32", device="cpu", backend="eager").report.kernels
    assert str(kernels["graft::rms_norm"]) == "aten (existing)"
    assert str(kernels["graft::paged_attention"]).startswith("reference (not triton: Triton kernels run on a GPU")


def test_weights_are_not_doubled_by_merging():
    model = load_model("tiny-llama", dtype="float32", device="cpu")
    llm = graft.LLM(model, backend="eager")  # others have tables of cosines beside the weights
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in (*model.module.parameters(), *llm.graph_module.parameters())
    }
    assert sum(storages.values()) == sum(p.numel() * 4 for p in model.module.parameters())


class Numbers:
    """A tokenizer that writes tokens as numbers."""

    def decode(self, tokens, skip_special_tokens):
        return "".join(f"<{t}>" for t in tokens)


def test_streams_do_not_disturb_each_other(monkeypatch):
    llm = engine("llama")
    monkeypatch.setattr(llm.engine, "tokenizer", Numbers())
    one, two = prompts((5, 9))
    params = graft.SamplingParams(max_tokens=6, ignore_eos=True)
    alone = ["".join(llm.stream(p, params)) for p in (one, two)]
    first, second = llm.stream(one, params), llm.stream(two, params)
    pieces = [[next(first)], [next(second)]]
    llm.generate([one], params)
    abandoned = llm.stream(two, params)
    next(abandoned)
    abandoned.close()
    pieces[0] += list(first)
    pieces[1] += list(second)
    assert ["".join(p) for p in pieces] == alone
    with llm.held() as held:
        assert held.idle and held.manager.available == held.manager.blocks


def test_a_wrong_request_does_not_stop_the_others():
    """Each gets its own error; what cannot run leaves nothing behind."""
    llm = engine("llama")
    asked = [[], [5, 6], [3] * 400, [999], [5, 6], "text", [1.5], b"\xff"]
    outputs = llm.generate(asked, GREEDY)
    kinds = [o.error and type(o.error) for o in outputs]
    wrong = TokenizerMissing
    assert kinds == [EmptyPrompt, None, PromptTooLong, UsageError, None, wrong, UsageError, wrong]
    assert [o.finish_reason for o in outputs].count("error") == 6
    assert outputs[1].token_ids == outputs[4].token_ids == llm.generate([[5, 6]], GREEDY)[0].token_ids
    assert llm.engine.idle and llm.engine.manager.available == llm.engine.manager.blocks


def test_unknown_options_are_errors():
    with pytest.raises(UsageError, match=r"unknown option 'kv_cache_size' of LLM; did you mean .*'kv_cache_memory'"):
        graft.LLM("tiny-llama", kv_cache_size=3)
    with pytest.raises(UsageError, match="max_num_seqs must be a whole number of at least 1, but is 0"):
        graft.LLM("tiny-llama", max_num_seqs=0)
    with pytest.raises(UsageError, match="kv_cache_memory is a size"):
        graft.LLM("tiny-llama", kv_cache_memory="much")


def test_a_seed_gives_the_same_tokens_in_chunks():
    llm = engine("llama")
    (prompt,) = prompts((29,))
    hot = graft.SamplingParams(max_tokens=5, temperature=1.5, seed=7, ignore_eos=True)
    whole = llm.generate([prompt], hot)[0].token_ids
    llm.engine.scheduler.max_num_batched_tokens = 8
    try:
        assert llm.generate([prompt], hot)[0].token_ids == whole
    finally:
        llm.engine.scheduler.max_num_batched_tokens = 2048
    cold = graft.SamplingParams(max_tokens=5, temperature=1e-39, seed=7, ignore_eos=True)
    assert llm.generate([prompt], cold)[0].token_ids == llm.generate([prompt], GREEDY)[0].token_ids[:5]
    with pytest.raises(UsageError, match="64 bits"):
        graft.SamplingParams(seed=2**70)


def test_logits_that_are_no_numbers_end_their_request_alone(monkeypatch):
    llm = engine("llama")
    expected = llm.generate([[5, 6]], GREEDY)[0].token_ids
    graph = llm.engine.graph

    def broken(*inputs):
        (logits,) = graph(*inputs)
        batch = Batch(*inputs[: len(NAMES)])
        for row, first in enumerate(batch.cu_seqlens[:-1].tolist()):
            if batch.input_ids[0, first] == 9:
                logits[0, row] = torch.nan
        return (logits,)

    monkeypatch.setattr(llm.engine, "graph", broken)
    monkeypatch.setattr(llm.engine, "tokenizer", Numbers())
    with pytest.raises(LogitsError):
        list(llm.stream([9, 9], GREEDY))
    bad, good = llm.generate([[9, 9], [5, 6]], GREEDY)
    assert bad.to_json()["error"] == str(bad.error) and good.to_json()["error"] is None
    assert bad.finish_reason == "error" and "no finite largest value" in str(bad.error)
    assert good.token_ids == expected and llm.engine.idle


@pytest.mark.parametrize(
    "at", ["graft.engine.engine.sample", "graft.engine.sampling.sampling.sample_tokens", "graph", "append_token"]
)
def test_a_step_that_fails_is_done_again_for_those_who_go_on(at, monkeypatch):
    """Three samples of one prompt are about to copy the block that they share when the step fails."""
    llm = engine("llama")
    params = graft.SamplingParams(max_tokens=9, temperature=1.1, n=3, seed=3, ignore_eos=True)
    (prompt,) = prompts((21,))
    (first,) = llm.generate([prompt], params)
    expected = [sample.token_ids for sample in (first, *first.alternatives)]
    for steps in (0, 1, 2):
        request = llm.engine.add(prompt, params)
        for _ in range(steps):
            llm.engine.step()
        with monkeypatch.context() as patch:
            patch.setattr(*((at,) if "." in at else (llm.engine, at)), lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                llm.engine.step()
        llm.engine.manager.check()
        while not llm.engine.idle:
            llm.engine.step()
        assert [one.new_tokens for one in request.family] == expected


def test_a_request_cancelled_in_the_middle_of_its_prompt_leaves_the_others_alone():
    llm = resized(engine("llama"), max_num_batched_tokens=8)
    long, small = prompts((60, 7))
    expected = llm.generate([small], GREEDY)[0].token_ids
    cancelled, kept = llm.engine.add(long, GREEDY), llm.engine.add(small, GREEDY)
    for _ in range(3):
        llm.engine.step()
    assert 0 < cancelled.computed < len(long)
    llm.engine.abort([cancelled])
    while not llm.engine.idle:
        llm.engine.step()
    assert cancelled.finish_reason == "abort" and cancelled.new_tokens == [] and kept.new_tokens == expected
    assert llm.engine.manager.available == llm.engine.manager.blocks


def test_an_engine_that_cannot_go_on_says_so(monkeypatch):
    llm = resized(engine("llama"))
    request = llm.engine.add([5, 6], GREEDY)
    monkeypatch.setattr(llm.engine.scheduler, "admit", lambda request: False)
    with pytest.raises(EngineStuck, match="waiting: 1, running: 0"):
        llm.engine.step()
    llm.engine.abort([request])
    assert llm.engine.step() == []


def test_a_step_that_breaks_off_between_two_samples_keeps_what_it_has(monkeypatch):
    """The first of three has its token when Ctrl-C comes; the others draw again, with the same random numbers."""
    llm = engine("llama")
    params = graft.SamplingParams(max_tokens=9, temperature=1.1, n=3, seed=3, ignore_eos=True)
    (prompt,) = prompts((21,))
    (first,) = llm.generate([prompt], params)
    for steps in (0, 2):
        request = llm.engine.add(prompt, params)
        for _ in range(steps):
            llm.engine.step()
        append, calls = llm.engine.append_token, []

        def once(one, choice, append=append, calls=calls):
            calls.append(one)
            if len(calls) == 2:
                raise KeyboardInterrupt
            append(one, choice)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(llm.engine, "append_token", once)
            llm.engine.step()
        llm.engine.manager.check()
        llm.finish([request])
        assert [one.new_tokens for one in request.family] == [one.token_ids for one in (first, *first.alternatives)]


def test_one_requests_nan_does_not_reach_another():
    """Keys and values that are NaN stay in the cache after their request has ended; nobody may see them."""
    model = load_model("tiny-llama", dtype="float32", device="cpu")
    llm = graft.LLM(model, max_num_batched_tokens=16)
    healthy = prompts((5, 9, 21, 40))
    expected = [o.token_ids for o in resized(llm).generate(healthy, GREEDY)]
    nan = next(t for t in range(3, 128) if not any(t in tokens for tokens in (*expected, *healthy)))
    with torch.no_grad():
        model.module.get_input_embeddings().weight[nan] = torch.nan
    block = llm.engine.cache_bytes // llm.engine.manager.blocks
    llm = resized(llm, max_num_batched_tokens=16, kv_cache_memory=16 * block)
    for bad in ([nan] * 40, [nan, 5], [5, nan] * 20):
        outputs = llm.generate([bad, *healthy, bad], GREEDY)
        assert outputs[0].finish_reason == outputs[-1].finish_reason == "error"
        assert [o.token_ids for o in outputs[1:-1]] == expected
    assert [o.token_ids for o in llm.generate(healthy, GREEDY)] == expected


def test_a_call_that_fails_while_it_is_taken_in_leaves_nothing_behind(monkeypatch):
    llm = resized(engine("llama"))
    enter, calls = llm.engine.enter, []
    monkeypatch.setattr(
        llm.engine, "enter", lambda request: calls.append(1) or (enter(request) if len(calls) < 2 else 1 / 0)
    )
    with pytest.raises(EngineFailed, match="ZeroDivisionError"):
        llm.generate([[5], [6]], GREEDY)
    assert llm.engine.idle
