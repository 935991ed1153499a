"""Decoders with recurrent layers: Hugging Face's tokens, however requests are batched, cut, stopped and begun."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import graft
from capture_cases import captured as engine
from conftest import graph_of, resized, tiny
from graft.base.errors import CacheMisuse, DecodeMismatch, OutOfMemory, UsageError
from graft.engine.kv.events import Created
from graft.engine.kv.states import StateCache, bytes_per_slot, slots_within
from graft.engine.setup.self_check import self_check
from graft.engine.setup.stages import settings_for
from graft.ops.packed_states import StateShape
from graft.workbench.check import scenario
from graft.workbench.cost import StepShape, state_traffic
from marks import examples, short

FAMILIES = short(["lfm2", "qwen3-next"], "lfm2")
NEW = 8
GREEDY = graft.SamplingParams(max_tokens=NEW, ignore_eos=True)
CONV, RULE = "graft.ops.stateful_causal_conv.reference.", "graft.ops.stateful_delta_rule.reference."


def prompts(lengths, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 128, (n,), generator=g).tolist() for n in lengths]


@cache
def alone(family: str, prompt: tuple[int, ...]) -> list[int]:
    """Hugging Face's own greedy tokens."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = tiny(family).module.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0,
            eos_token_id=-1,
        )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def check(llm, family, given_prompts):
    found = [output.token_ids for output in llm.generate(given_prompts, GREEDY)]
    assert found == [alone(family, tuple(prompt)) for prompt in given_prompts]
    assert sorted(llm.engine.states.free) == list(range(llm.engine.states.slots)), "every slot comes back"
    assert llm.engine.manager.available == llm.engine.manager.blocks


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", short([1, 3, 7, 64, 65, 2048], 3, 2048))
def test_tokens_equal_hugging_face_in_chunks_of_any_size(family, budget):
    """More requests than slots, prompts around a chunk of the delta rule, and steps that hold all kinds of rows."""
    llm = resized(engine(family), max_num_batched_tokens=budget, max_num_seqs=3)
    check(llm, family, prompts((1, 2, 64, 9, 65) if budget > 1 else (1, 2, 9, 30)))


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=examples(10), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=5), budget=st.integers(2, 80), seqs=st.integers(1, 4)
)
def test_any_batch_gives_each_request_its_own_tokens(family, lengths, budget, seqs):
    check(resized(engine(family), max_num_batched_tokens=budget, max_num_seqs=seqs), family, prompts(lengths))


@pytest.mark.parametrize("family", FAMILIES)
def test_whoever_gives_way_is_computed_again_from_its_start(family):
    whole = engine(family).engine
    block = whole.cache_bytes // whole.manager.blocks
    room = 3 * block + 2 * 3 * bytes_per_slot(whole.states.shapes)
    llm = resized(engine(family), kv_cache_memory=room, max_num_seqs=3, admission="greedy")
    full = 16 * (llm.engine.manager.blocks // 3)  # tokens; three such requests leave less than a block for each
    given_prompts = prompts((full - 2, full - 3, full - 1))
    check(llm, family, given_prompts)
    assert llm.stats.preemptions > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_that_come_late_and_those_that_are_given_up(family):
    llm = resized(engine(family), max_num_batched_tokens=5, max_num_seqs=2)
    first, second, third, fourth = prompts((11, 9, 7, 3), seed=1)
    with llm.held() as core:
        early = [core.add(prompt, GREEDY) for prompt in (first, second)]
        for _ in range(4):
            core.step()
        late = [core.add(prompt, GREEDY) for prompt in (third, fourth)]
        core.abort(early[1:])  # in the middle of its prompt or answer; another takes its slot
        while not core.idle:
            core.step()
    for prompt, request in ((first, early[0]), (third, late[0]), (fourth, late[1])):
        assert request.new_tokens == alone(family, tuple(prompt))
    assert early[1].finish_reason == "abort" and early[1].state_slot is None
    assert len(core.states.free) == 2


def test_what_another_request_left_in_a_slot_would_be_seen(monkeypatch):
    """The tests above rest on new sequences that begin at zeros: without that they fail."""
    llm = resized(engine("lfm2"), max_num_seqs=1)
    some = prompts((9, 7))
    llm.generate(some[:1], GREEDY)
    assert any(tensor.any() for tensor in llm.engine.states.tensors), "it does leave something"
    wanted = alone("lfm2", tuple(some[1]))
    monkeypatch.setattr(CONV + "held_states", lambda state, slots, *_: state[slots])
    assert llm.generate(some[1:], GREEDY)[0].token_ids != wanted
    monkeypatch.undo()
    assert llm.generate(some[1:], GREEDY)[0].token_ids == wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_of_one_prompt_go_on_from_its_state(family, monkeypatch):
    llm = resized(engine(family), max_num_seqs=3)
    (prompt,) = prompts((10,))

    def sampled(n, seed):
        params = graft.SamplingParams(max_tokens=NEW, ignore_eos=True, temperature=2.0, seed=seed, n=n)
        (output,) = llm.generate([prompt], params)
        return [output.token_ids, *(other.token_ids for other in output.alternatives)]

    wanted = [sampled(1, seed)[0] for seed in (5, 6, 7)]
    assert sampled(3, 5) == wanted and wanted[0] != wanted[1]
    monkeypatch.setattr(StateCache, "copy", lambda *_: None)
    assert sampled(3, 5) != wanted, "a sample that got no state goes another way"


def test_a_step_that_fails_is_computed_again():
    llm = resized(engine("lfm2"), max_num_batched_tokens=6, max_num_seqs=2)
    graph, calls = llm.engine.graph, []
    some = prompts((9, 4))

    def failing(*inputs):
        calls.append(1)
        found = graph(*inputs)  # states are written by then
        if len(calls) == 4:
            raise KeyboardInterrupt
        return found

    with llm.held() as core:
        requests = [core.add(prompt, GREEDY) for prompt in some]
        core.graph = failing
        while not core.idle:
            try:
                core.step()
            except KeyboardInterrupt:
                calls.append(1)
    assert len(calls) > 4 and llm.stats.preemptions > 0
    assert [request.new_tokens for request in requests] == [alone("lfm2", tuple(prompt)) for prompt in some]


def test_the_report_says_what_is_kept_and_that_no_prefix_is_reused():
    llm = resized(engine("lfm2"), max_num_seqs=4)
    (note,) = [note for note in llm.engine.notes if note.startswith("recurrent states")]
    assert "4 slots of 768 bytes, 3.0 KiB" in note and "prefix reuse is off" in note
    some = prompts((40,))
    for _ in range(2):
        (output,) = llm.generate(some, GREEDY)
        assert output.cached_tokens == 0
    assert [type(event) for event in llm.kv_cache_events()] == [Created]
    (checked,) = [note for note in engine("lfm2").report.notes if note.startswith("self-check")]
    assert "keys and values and 3 recurrent states" in checked


def self_checked(llm):
    cache = llm.cache
    return self_check(llm.engine, llm.model, cache.tensors(), cache.state_names)


def test_a_state_that_is_lost_between_steps_is_told_by_its_layer(monkeypatch):
    llm = resized(engine("lfm2"))
    assert "agree" in self_checked(llm)
    assert not any(tensor.any() for tensor in llm.engine.states.tensors), "the check leaves nothing"
    monkeypatch.setattr(CONV + "held_states", lambda state, slots, *_: torch.zeros_like(state[slots]))
    with pytest.raises(DecodeMismatch, match=r"the recurrent states of model\.layers\.\d\.conv"):
        self_checked(llm)


@pytest.mark.exhaustive
def test_a_delta_rule_that_begins_anew_is_told_by_its_layer(monkeypatch):
    monkeypatch.setattr(RULE + "held_states", lambda state, slots, *_: torch.zeros_like(state[slots]))
    with pytest.raises(DecodeMismatch, match=r"the recurrent states of model\.layers\.0\.linear_attn"):
        self_checked(resized(engine("qwen3-next")))


def test_slots_are_counted_in_the_memory_of_caches():
    shapes = [StateShape((4, 2), torch.float32), StateShape((8,), torch.bfloat16)]
    assert bytes_per_slot(shapes) == 48
    cpu = torch.device("cpu")
    assert slots_within(shapes, 10, cpu, 2 * 48 * 10).blocks == 10
    fewer = slots_within(shapes, 10, cpu, 2 * 48 * 10 - 1)
    assert (fewer.blocks, fewer.bytes) == (9, 9 * 48)
    with pytest.raises(OutOfMemory):
        slots_within(shapes, 10, cpu, 48)
    whole = engine("lfm2").engine
    block, slot = whole.cache_bytes // whole.manager.blocks, bytes_per_slot(whole.states.shapes)
    llm = resized(engine("lfm2"), kv_cache_memory=4 * slot + 7 * block, max_num_seqs=100)
    core = llm.engine
    assert core.states.nbytes + core.cache_bytes <= 4 * slot + 7 * block
    assert core.scheduler.max_num_seqs == core.states.slots < 100
    assert any("(not 100: more would take over half" in note for note in core.notes)


def test_a_slot_is_given_once_and_taken_back_once():
    states = StateCache([StateShape((2,), torch.float32)], 2, torch.device("cpu"))
    first, second = states.take(), states.take()
    assert {first, second} == {0, 1}
    with pytest.raises(CacheMisuse, match="all 2 slots"):
        states.take()
    states.tensors[0][first] = 3.0
    states.copy(first, second)
    assert states.tensors[0].tolist() == [[3.0, 3.0]] * 2
    states.give_back(first)
    for wrong in (first, 7, -1):
        with pytest.raises(CacheMisuse, match="not in use"):
            states.give_back(wrong)


def test_what_cannot_be_is_refused_by_name():
    model = tiny("lfm2")
    with pytest.raises(UsageError, match="needs the transform insert_state_cache"):
        settings_for(model, None, sets=["transforms.insert_state_cache.enabled=false"])


@pytest.mark.parametrize("family", FAMILIES)
def test_what_graft_check_runs_has_a_state_for_each_sequence(family, monkeypatch):
    """Prompts, chunks and decode steps over the transformed graph give the logits of the captured one."""
    wanted, steps = scenario.logits(graph_of(tiny(family).module)), engine(family).graph_module
    torch.testing.assert_close(scenario.logits(steps), wanted, rtol=1e-3, atol=1e-4)
    monkeypatch.setattr(scenario, "slots_in", lambda batch: torch.zeros_like(batch.seq_lens))
    assert not torch.allclose(scenario.logits(steps), wanted, atol=1e-1), "one slot for all is seen"


def test_the_cost_of_a_step_counts_the_states_of_its_sequences():
    gm = engine("lfm2").graph_module
    (conv, *_) = [node for node in gm.graph.nodes if node.target is torch.ops.graft.stateful_causal_conv.default]
    assert state_traffic(conv, StepShape(5, 100)) == 2 * 5 * 32 * 2 * 4


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["lfm2", "qwen3-next"])
@pytest.mark.parametrize("options", [{"kv_cache_dtype": "fp8"}, {"quantize": "int8"}, {"runner": "pooling"}], ids=str)
def test_other_engines_carry_the_states_as_well(family, options):
    """Each is checked at load against one pass."""
    llm = graft.LLM(tiny(family), backend="eager", **options)
    assert any("recurrent states" in note for note in llm.report.notes)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["lfm2", "qwen3-next"])
@pytest.mark.parametrize("backend", ["eager", "native"])
def test_compiled_engines_have_the_states(family, backend, tmp_path):
    llm = graft.LLM(f"tiny-{family}", dtype="float32", device="cpu", backend=backend, max_num_seqs=3)
    some = prompts((9, 1, 20))
    check(llm, family, some)
    llm.save(tmp_path / "engine")
    again = graft.LLM(tmp_path / "engine", max_num_seqs=3, max_num_batched_tokens=7)
    assert again.cache.states == llm.cache.states
    check(again, family, some)
