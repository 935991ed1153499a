"""Decoding by CUDA graphs: the eager engine's tokens, without a wait in a step."""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from functools import cache

import pytest
import torch
import triton

import graft
from graft.engine.decode.capture import CapturedSteps
from graft.models.load import load_model
from graft.models.registry import families
from graft.ops.advance_rows import cases as advance_cases
from graft.ops.advance_rows.reference import advance_rows
from graft.ops.argmax_rows import cases as argmax_cases
from graft.ops.argmax_rows.reference import argmax_rows
from graft.ops.launch import pdl_supported

NEW = 24


@cache
def model(family: str, dtype: str = "float32"):
    return load_model(f"tiny-{family}", dtype=dtype, device="cuda")


def prompts(lengths, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(3, 128) for _ in range(n)] for n in lengths]


def greedy(tokens=NEW, **options):
    return graft.SamplingParams(max_tokens=tokens, ignore_eos=True, **options)


def drawn(i: int):
    kinds = ({}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05, "top_p": 0.95, "top_k": 50})
    return graft.SamplingParams(
        max_tokens=NEW - i, temperature=0.5 + 0.2 * i, seed=i, ignore_eos=True, **kinds[i % 4]
    )


@pytest.mark.parametrize("family", sorted(families()))
def test_tokens_equal_the_eager_engine_float32(family):
    """Batches of every size up to 5, which shrink as requests end; greedy and drawn."""
    given = prompts((3, 17, 9, 33, 5))
    params = [greedy(NEW - 4 * i) for i in range(5)]
    seeded = [drawn(i) for i in range(5)]
    eager = graft.LLM(model(family), enforce_eager=True, max_num_seqs=8)
    llm = graft.LLM(model(family), max_num_seqs=8)
    assert eager.engine.loop is None and llm.engine.loop is not None
    for count in (1, 2, 3, 5):
        expected = eager.generate(given[:count], params[:count])
        assert [o.token_ids for o in llm.generate(given[:count], params[:count])] == [o.token_ids for o in expected]
        assert llm.stats.replayed_steps >= NEW - 1 and llm.stats.bucket_misses == 0 and llm.stats.steps_ahead > 10
    expected = eager.generate(given, seeded)
    assert [o.token_ids for o in llm.generate(given, seeded)] == [o.token_ids for o in expected]
    mixed = [seeded[0], params[1], greedy(20, logprobs=2), greedy(20, repetition_penalty=1.2), seeded[4]]
    expected = eager.generate(given, mixed)
    assert [o.token_ids for o in llm.generate(given, mixed)] == [o.token_ids for o in expected]


@pytest.mark.parametrize("family", ["llama", "lfm2", "qwen3-next"])
def test_a_steady_step_waits_for_nothing(family):
    """torch tells of every call that waits for the device, except of the event that the host is meant to wait for."""
    llm = graft.LLM(model(family), max_num_seqs=4)
    for params in ([greedy(60)] * 3, [drawn(0), drawn(1), greedy(60)]):
        requests = [llm.engine.add(*one) for one in zip(prompts((5, 15, 30)), params, strict=True)]
        for _ in range(4):
            llm.engine.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(15):  # over the borders of blocks
                assert len(llm.engine.step()) == 3
            with pytest.raises(RuntimeError, match="synchroniz"):  # the detector works
                llm.engine.loop.buffers.tokens.tolist()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert llm.engine.loop.in_flight
        llm.finish(requests)


def test_the_device_has_the_next_step_before_the_host_knows_the_last():
    llm = graft.LLM(model("llama"), max_num_seqs=4)
    llm.generate(prompts((5, 9)), greedy(40))
    assert llm.stats.replayed_steps == llm.stats.steps_ahead == 39
    assert llm.stats.decode_tokens == 78 and llm.stats.decode_seconds > 0


def test_memory_does_not_grow():
    llm = graft.LLM(model("llama"), max_num_seqs=4)
    params = [greedy(220), graft.SamplingParams(max_tokens=220, temperature=1.0, top_p=0.9, seed=1, ignore_eos=True)]
    requests = [llm.engine.add(*one) for one in zip(prompts((5, 9)), params, strict=True)]
    for _ in range(10):
        llm.engine.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(200):
        llm.engine.step()
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
    llm.finish(requests)


@pytest.mark.parametrize("family", ["llama", "gemma-3", "qwen3-moe"])
def test_bfloat16_logits_of_a_capture_equal_the_eager_ones(family):
    """The same kernels on the same rows: the logits of a replay are those of the calls, bit for bit."""
    llm = graft.LLM(model(family, "bfloat16"), max_num_seqs=4, cudagraph_capture_sizes=[4])
    requests = [llm.engine.add(p, greedy(30)) for p in prompts((5, 9, 17, 30))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine, "go_ahead", lambda step: None)  # the test makes the next steps itself
        llm.engine.step()
    loop, seen = llm.engine.loop, []
    for _ in range(6):
        plan = llm.engine.scheduler.schedule()
        with torch.inference_mode():
            capture = loop.captures.get(loop.captures.key(4, 1, "logits"))
            replayed = loop.logits(plan, capture).clone()
            direct = loop.captures.body(loop.captures.key(4, 1, "logits"))
            loop.buffers.fill(plan.requests, 4)
            seen.append((replayed, direct().clone()))
            eager = llm.engine.run(plan)
            assert (eager.float() - replayed.float()).abs().max() < 0.1 * eager.float().std()
            for request, row in zip(plan.requests, replayed.argmax(-1).tolist(), strict=True):
                llm.engine.keep(request, 1)
                request.tokens.append(row)
    assert all(torch.equal(a, b) for a, b in seen)
    assert not torch.equal(seen[0][0], seen[1][0]), "the steps differ, so the test can fail"
    llm.engine.abort(requests)


def test_the_report_tells_of_graphs_misses_and_late_captures():
    told = []
    llm = graft.LLM(
        model("llama"), max_num_seqs=8, cudagraph_capture_sizes=[1, 2], progress=lambda *what: told.append(what)
    )
    notes = "\n".join(llm.report.notes)
    assert "decode: 2 CUDA graphs for batches of 1, 2" in notes
    assert f"programmatic dependent launch: {'on' if pdl_supported(torch.device('cuda')) else 'off'}" in notes
    assert [what for what in told if what[0] == "capturing CUDA graphs"] == [
        ("capturing CUDA graphs", done, 2) for done in range(3)
    ]
    llm.generate(prompts((5, 9, 7)), greedy(5))
    assert llm.stats.bucket_misses == 4 and llm.stats.replayed_steps == 0
    llm.generate(prompts((5,)), drawn(0))
    notes = "\n".join(llm.report.notes)
    assert "decode batches larger than 2 run without a CUDA graph" in notes
    assert "captured when first needed: a sampled step of 1 rows" in notes
    off = graft.LLM(model("llama"), enforce_eager=True)
    assert "decode: no CUDA graphs, because enforce_eager was asked for" in off.report.notes


def test_every_default_size_is_recorded():
    llm = graft.LLM(model("qwen3"))
    assert sorted(rows for rows, *_ in llm.engine.loop.captures.made) == [1 << i for i in range(11)]  # to 1,024
    given = prompts([5 + i % 9 for i in range(100)])
    expected = graft.LLM(model("qwen3"), enforce_eager=True).generate(given, greedy(8))
    assert [o.token_ids for o in llm.generate(given, greedy(8))] == [o.token_ids for o in expected]


def test_first_runs_compile_side_by_side_and_each_kernel_once(monkeypatch, tmp_path):
    """Counted where Triton's functions compile; the tokens after it are those of the eager engine."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled, together = fresh_kernels(monkeypatch), []
    original = CapturedSteps.compile_all

    def counted(self, keys, beside, progress=None):
        before = len(compiled)
        original(self, keys, beside, progress)
        together.extend(compiled[before:])
        assert self.failures == {} and len({rows for rows, *_ in keys}) == 4

    monkeypatch.setattr(CapturedSteps, "compile_all", counted)
    sizes = {"max_num_seqs": 8, "cudagraph_capture_sizes": [1, 2, 4, 8]}
    llm = graft.LLM(model("llama", "bfloat16"), **sizes, self_check=False)  # which would compile a prompt's kernels
    assert together and len(together) == len(set(together)), "each kernel once"
    at = compiled.index(together[-1])
    assert compiled[at + 1 :] == [], "capture compiled nothing more"
    assert sorted(rows for rows, *_ in llm.engine.loop.captures.made) == [1, 2, 4, 8]
    given = prompts((3, 17, 9, 33, 5))
    for count in (1, 2, 5):
        first = [o.token_ids for o in llm.generate(given[:count], greedy())]
        again = graft.LLM(model("llama", "bfloat16"), max_num_seqs=8, cudagraph_capture_sizes=[1, 2, 4, 8])
        assert [o.token_ids for o in again.generate(given[:count], greedy())] == first
    exact = graft.LLM(model("llama"), max_num_seqs=8, cudagraph_capture_sizes=[1, 2, 4, 8])
    expected = graft.LLM(model("llama"), enforce_eager=True, max_num_seqs=8).generate(given, greedy())
    assert [o.token_ids for o in exact.generate(given, greedy())] == [o.token_ids for o in expected]


@pytest.mark.parametrize("lengths", [range(60, 69), range(1, 40), [200, 3]], ids=["long", "short", "mixed"])
@pytest.mark.parametrize("tokens", [512, 4096])
def test_no_request_waits_for_the_kernels_of_a_step_with_prompts(tokens, lengths, monkeypatch, tmp_path):
    """Of as many tokens as a step has, and of few, alone and beside those that decode."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = fresh_kernels(monkeypatch)
    llm = graft.LLM(model("llama", "bfloat16"), max_num_seqs=64, max_num_batched_tokens=tokens)
    before = len(compiled)
    llm.generate(prompts([lengths[0]]), greedy(3))
    llm.generate(prompts([lengths[i % len(lengths)] for i in range(150)]), greedy(24))
    assert compiled[before:] == [] and not any("first run" in note for note in llm.report.notes)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_no_request_waits_for_the_kernels_of_quantized_weights(quantize, monkeypatch, tmp_path):
    """Few tokens and many have kernels of their own."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = fresh_kernels(monkeypatch)
    llm = graft.LLM(model("llama", "bfloat16"), max_num_seqs=64, max_num_batched_tokens=4096, quantize=quantize)
    before = len(compiled)
    llm.generate(prompts([60]), greedy(3))
    llm.generate(prompts([1 + i % 90 for i in range(150)]), greedy(24))
    assert compiled[before:] == [] and not any("first run" in note for note in llm.report.notes)


def test_steps_with_prompts_ask_the_driver_for_no_memory():
    """Device or pinned: each would wait for what is in flight."""
    llm = graft.LLM(model("llama", "bfloat16"), max_num_seqs=64, max_num_batched_tokens=4096)
    assert not any("no memory for a step" in note for note in llm.report.notes)
    llm.generate(prompts([9]), greedy(2))  # what a first call of anything takes

    def asked():
        return torch.cuda.memory_stats()["num_device_alloc"], torch.cuda.host_memory_stats()["num_host_alloc"]

    before = asked()
    llm.generate(prompts([200 + i % 7 for i in range(160)]), greedy(6))  # steps of 4,096 tokens
    assert asked() == before
    torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    assert asked() > before  # it is counted


def fresh_kernels(monkeypatch):
    """As in a new process: Triton's functions forget what they compiled until the test ends. The list grows by each
    compilation: its name, a key, and what it is compiled for."""
    functions = {
        id(value): value
        for name, module in list(sys.modules.items())
        if name.startswith("graft.ops")
        for value in vars(module).values()
        if isinstance(value, triton.JITFunction)
    }
    compiled, original = [], triton.compiler.compile

    def compile_it(source, *args, **kwargs):
        what = f"{source.signature} {source.constants} {source.attrs} {kwargs['options']}"
        compiled.append((source.name, source.hash(), what))
        return original(source, *args, **kwargs)

    monkeypatch.setattr(triton.compiler, "compile", compile_it)  # a function takes it from there when first called
    for function in functions.values():
        monkeypatch.setattr(function, "compile", compile_it, raising=False)
        monkeypatch.setattr(function, "device_caches", defaultdict(function.create_binder))
    return compiled


def test_a_failing_first_run_is_told_for_its_size_and_the_engine_goes_on(monkeypatch):
    body = CapturedSteps.body

    def failing(self, key):
        step = body(self, key)

        def run():
            if key[0] == 2:
                raise RuntimeError("no such instruction")
            return step()

        return run

    monkeypatch.setattr(CapturedSteps, "body", failing)
    llm = graft.LLM(model("llama"), max_num_seqs=4)
    assert [rows for rows, *_ in llm.engine.loop.captures.made] == [4]
    assert any("capturing a greedy step of 2 rows failed: RuntimeError: no such" in n for n in llm.report.notes)
    expected = graft.LLM(model("llama"), enforce_eager=True).generate(prompts((5, 9)), greedy())
    assert [o.token_ids for o in llm.generate(prompts((5, 9)), greedy())] == [o.token_ids for o in expected]


def test_replays_own_their_workspaces():
    """torch.compile's CUDA graphs free the workspaces of cuBLAS of all streams, and others get their memory."""
    llm = graft.LLM(model("llama"), max_num_seqs=4, kv_cache_memory="1GiB")
    given = prompts((16, 16))
    expected = [[o.token_ids for o in llm.generate(given, greedy())] for _ in range(4)][-1]  # prompts captured too
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    theirs = torch.full((256 << 20,), 77, dtype=torch.uint8, device="cuda")
    assert [o.token_ids for o in llm.generate(given, greedy())] == expected
    assert bool((theirs == 77).all())


def test_a_step_that_waits_is_not_recorded_and_the_engine_goes_on(monkeypatch):
    """Found while warming up, before a capture that torch could not undo."""
    body = CapturedSteps.body

    def waiting(self, key):
        step = body(self, key)

        def run():
            logits = step()
            logits.sum().item()
            return logits

        return run

    monkeypatch.setattr(CapturedSteps, "body", waiting)
    llm = graft.LLM(model("llama"), max_num_seqs=4)
    expected = graft.LLM(model("llama"), enforce_eager=True).generate(prompts((5, 9)), greedy())
    assert [o.token_ids for o in llm.generate(prompts((5, 9)), greedy())] == [o.token_ids for o in expected]
    assert llm.stats.replayed_steps == 0 and llm.stats.bucket_misses == NEW - 1
    assert any(
        "decode steps without a CUDA graph: capturing a greedy step of 4 rows failed" in n for n in llm.report.notes
    )


def test_steps_on_another_stream_come_behind():
    llm = graft.LLM(model("llama"), max_num_seqs=4)
    expected = [o.token_ids for o in llm.generate(prompts((5, 9)), greedy())]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    requests = [llm.engine.add(p, greedy()) for p in prompts((5, 9))]
    for i in range(1000):
        if llm.engine.idle:
            break
        with torch.cuda.stream(streams[i % 2]):
            llm.engine.step()
    assert [r.new_tokens for r in requests] == expected


def test_soak_with_prefixes_aborts_and_a_small_cache():
    """Random traffic: the tokens of the eager engine, and every block comes back."""

    def run(**options):
        llm = graft.LLM(model("mistral"), max_num_seqs=12, max_num_batched_tokens=48, **options)
        block = llm.engine.cache_bytes // llm.engine.manager.blocks
        llm = graft.LLM(
            model("mistral"), max_num_seqs=12, max_num_batched_tokens=48, kv_cache_memory=40 * block, **options
        )
        rng, requests = random.Random(3), []
        prefixes = prompts((16, 33, 48), seed=9)
        for i in range(120):
            tail = [rng.randrange(3, 128) for _ in range(rng.randint(1, 20))]
            prompt = (rng.choice(prefixes) if rng.random() < 0.6 else []) + tail
            params = drawn(i % 5) if rng.random() < 0.5 else greedy(rng.choice([2, 9, 30]))
            requests.append(llm.engine.add(prompt, params))
            for _ in range(rng.choice([0, 0, 1, 5])):
                llm.engine.step()
        llm.finish(requests)
        llm.engine.manager.check()
        assert llm.engine.manager.available == llm.engine.manager.blocks == 40
        return llm, [r.new_tokens for r in requests]

    _, expected = run(enforce_eager=True)
    llm, got = run()
    assert got == expected and llm.engine.loop.launched > 100


@pytest.mark.parametrize("case", argmax_cases.CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_argmax_rows_is_exact_and_capturable(case, dtype):
    (logits,) = case.make("cuda", dtype, torch.Generator().manual_seed(1))
    expected = argmax_rows(logits.cpu())
    assert torch.ops.graft.argmax_rows(logits).cpu().equal(expected)


@pytest.mark.parametrize("case", advance_cases.CASES, ids=lambda case: case.name)
def test_advance_rows_writes_what_the_reference_writes(case):
    args = case.make("cpu", torch.float32, torch.Generator().manual_seed(1))
    there = [a.to("cuda") if isinstance(a, torch.Tensor) else a for a in args]
    got = torch.ops.graft.advance_rows(*there)
    assert got.cpu().equal(advance_rows(*args))
    assert all(a.cpu().equal(b) for a, b in zip(there[:6], args[:6], strict=True))
