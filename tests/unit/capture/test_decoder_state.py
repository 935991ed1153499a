"""Whatever a decoder keeps from step to step is carried, or the model is refused by the names of what it keeps."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from conftest import resized, tiny
from graft import LLM, SamplingParams
from graft.base.errors import CaptureError, DecodeMismatch, GraftError, UnsupportedState, UsageError
from graft.capture import state as capture_state
from graft.capture.state import by_layer, check_attentions, check_state, own_state
from graft.engine.core import Stats
from graft.engine.kv.events import Created
from graft.engine.options import EngineOptions
from graft.engine.setup.build import build_engine
from graft.engine.setup.self_check import self_check, tolerance
from graft.models.load import LoadedModel
from marks import examples, short
from tiny_decoders import CONTEXT, DECODERS, tiny_decoder

PROMPT = [5, 17, 33, 8, 60, 21]
LINEAR = "LinearAttentionLayer: conv_states[0], recurrent_states[0])"
# one of each class of cache, cache layer and other place where transformers keeps state
REFUSED = {
    "qwen3_5_text": f"past_key_values.layers 0, 1, 2 ({LINEAR}",
    "lfm2_moe": "past_key_values.layers 0, 2 (LinearAttentionLayer: conv_states[0])",
    "mamba2": f"cache_params.layers 0, 1, 2, 3 ({LINEAR}",
    "falcon_h1": "layers 0, 1, 2, 3 (LinearAttentionAndFullAttentionLayer: conv_states[0], recurrent_states[0], keys",
    "jamba": f"past_key_values.layers 0, 2 ({LINEAR}",
    "bamba": f"past_key_values.layers 0, 2 ({LINEAR}",
    "zamba2": f"past_key_values.layers 0, 2 ({LINEAR}",
    "inkling_text": "(LinearAttentionAndSlidingWindowAttentionLayer: ",
    "minimax": "past_key_values.linear_cache 1, 3 (MiniMaxCache)",
    "hy_v4": "(DynamicIndexedLayer: indexer_keys, keys, values)",
    "deepseek_v4": "(DeepseekV4HCACache: ",
    "recurrent_gemma": "model.layers 0, 1, 3 (RecurrentGemmaRecurrentBlock: temporal_block.conv1d_state)",
    "rwkv": "state 0, 1, 2, 3, 4 (RwkvForCausalLM)",
    "xlnet": "mems 0, 1, 2, 3 (XLNetLMHeadModel)",
    "xlstm": "cache_params.rnn_state 0, 1, 2, 3 (xLSTMCache",
    "reformer": "past_buckets_states.states_cache 0, 1 (ReformerDynamicCache)",
}
# plain, windows, both, the self-attention half of an encoder-decoder's cache, and one without a cache object
CARRIED = ("llama", "gemma3_text", "cohere2", "megatron-bert", "openai-gpt")


def loaded(kind: str, dtype: torch.dtype = torch.float32, **more) -> LoadedModel:
    return LoadedModel(kind, tiny_decoder(kind, dtype, **more), None, None, CONTEXT)


@pytest.mark.some(8)
@pytest.mark.parametrize("kind", REFUSED)
def test_state_that_nobody_carries_is_refused_by_name(kind):
    with pytest.raises(UnsupportedState, match=re.escape(REFUSED[kind])):
        check_state(tiny_decoder(kind))


@pytest.mark.some(2)
@pytest.mark.parametrize("kind", CARRIED)
def test_keys_and_values_are_carried(kind):
    kept = check_state(tiny_decoder(kind))
    assert {s.name for s in kept} <= {"keys", "values", "_sliding_window_tensor"}
    assert len([s for s in kept if s.name == "keys"]) == (0 if kind == "openai-gpt" else 4)


@settings(max_examples=examples(12), deadline=None)
@given(
    st.sampled_from([("lfm2_moe", "conv"), ("granitemoehybrid", "mamba"), ("qwen3_5_text", "linear_attention")]),
    st.lists(st.booleans(), min_size=4, max_size=4).filter(any),
)
def test_exactly_the_layers_with_other_state_are_named(family, attends):
    """Any mixture: all attention is carried, and one layer of another kind is enough to be refused."""
    kind, other = family
    names = {"granitemoehybrid": "attention"}
    types = [names.get(kind, "full_attention") if each else other for each in attends]
    model = tiny_decoder(kind, layer_types=types)
    wanted = ", ".join(str(i) for i, each in enumerate(attends) if not each)
    if not wanted:
        assert all(s.carried for s in check_state(model))
        return
    with pytest.raises(UnsupportedState) as caught:
        check_state(model)
    assert f"keeps past_key_values.layers {wanted} (LinearAttentionLayer" in str(caught.value)


@pytest.mark.parametrize("kind", short(DECODERS, "llama", "qwen3_next"))
def test_every_decoder_is_accounted_for(kind):
    """Each architecture of transformers that can be built tiny: whatever its cache holds after a real prompt and a
    real token is among what was found without numbers."""
    try:
        model = tiny_decoder(kind)
        with torch.no_grad():
            first = model(input_ids=torch.tensor([PROMPT]), use_cache=True)
            cache = first.get("past_key_values")
            if isinstance(cache, DynamicCache):
                model(input_ids=torch.tensor([[7]]), use_cache=True, past_key_values=cache)
    except Exception as error:  # noqa: BLE001  (no tiny one can be built or run by transformers either)
        pytest.skip(f"{type(error).__name__}: {error}")
    try:
        found = {state.path for state in own_state(model)}
    except UnsupportedState as error:
        assert "cannot be run" in str(error)
        return
    if isinstance(cache, DynamicCache):
        real = capture_state.find_tensors({"past_key_values": cache}, type(model))
        assert {state.path for state in real} <= found


def test_the_engine_refuses_before_anything_is_captured(monkeypatch):
    monkeypatch.setattr("graft.capture.decoder.export_graph", None)
    with pytest.raises(CaptureError, match=r"Lfm2MoeForCausalLM is not supported: .*layers 0, 2 .*conv_states"):
        LLM(loaded("lfm2_moe"), backend="eager")


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", short(["gemma3_text", "megatron-bert", "gpt_oss", "bart"], "gemma3_text"))
def test_what_is_not_refused_generates_as_hugging_face_does(kind):
    """Of the property above the dear half: caches of every class that is carried."""
    model = loaded(kind)
    with torch.no_grad():
        wanted = model.module.generate(
            torch.tensor([PROMPT]), max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, len(PROMPT) :].tolist()
    try:
        llm = LLM(model, backend="eager")
    except GraftError as error:
        assert kind != "gemma3_text", error
        return
    assert llm.generate([PROMPT], SamplingParams(max_tokens=10, ignore_eos=True))[0].token_ids == wanted


def test_layers_whose_attention_was_not_captured_are_refused():
    model = tiny("llama").module
    kept = check_state(model)
    check_attentions(model, kept, 2)
    with pytest.raises(UnsupportedState, match=r"of 2 layers with keys and values 1 call"):
        check_attentions(model, kept, 1)
    with pytest.raises(CaptureError, match="no attention was captured"):
        check_attentions(model, kept, 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["recurrent_gemma", "mixtral"])
def test_the_model_is_as_it_was(kind):
    model = tiny_decoder(kind)
    before = [(m, dict(vars(m)), dict(m._buffers)) for m in model.modules()]
    experts = getattr(model.config, "_experts_implementation", None)
    own_state(model)
    assert all(vars(m).keys() == v.keys() and all(vars(m)[k] is x for k, x in v.items()) for m, v, _ in before)
    assert all(m._buffers.keys() == b.keys() and all(m._buffers[k] is x for k, x in b.items()) for m, _, b in before)
    assert getattr(model.config, "_experts_implementation", None) == experts


@pytest.mark.parametrize("dtype", short([torch.float32, torch.bfloat16], torch.float32), ids=str)
@pytest.mark.parametrize("kind", short(["lfm2_moe", "falcon_h1"], "lfm2_moe"))
def test_decoding_without_the_state_is_found_by_its_numbers(kind, dtype, monkeypatch):
    """The second net: where the accounting is fooled, decode steps differ from a full pass."""
    monkeypatch.setattr("graft.capture.decoder.check_state", lambda model: [])
    model = loaded(kind, dtype, initializer_range=0.3)
    with pytest.raises(DecodeMismatch, match=r"(keys|values) of model\.layers\.[01]\.self_attn differ by"):
        LLM(model, backend="eager")


@pytest.mark.exhaustive
def test_the_check_can_be_turned_off():
    llm = LLM(tiny("llama"), backend="eager", self_check=False)
    assert "self-check: turned off (self_check=False)" in llm.report.notes


@pytest.fixture(scope="module")
def llm():
    return LLM(tiny("llama"), backend="eager")


def check_of(llm, engine) -> str:
    return self_check(engine, llm.model, llm.cache.tensors())


def test_the_report_tells_the_check_and_nothing_else_is_left(llm):
    (note,) = [note for note in llm.report.notes if note.startswith("self-check")]
    assert re.search(r"2 decode steps agree .* 7 tokens, .* \(allowed: 3\.5e-04\), \d+ ms", note)
    engine = llm.engine
    assert engine.stats == Stats() and engine.idle and engine.scheduler.clock == 0
    found = engine.manager.stats()
    assert (found.used, found.cached, found.asked_tokens, found.free) == (0, 0, 0, found.blocks)
    assert [type(event) for event in llm.kv_cache_events()] == [Created]
    assert not any(tensor.any() for tensor in engine.tensors)
    with pytest.raises(UsageError, match="self_check must be True or False"):
        EngineOptions(self_check=1)


def test_captures_are_checked_as_requests_run_them(llm):
    """With a decode loop: greedy captures, none made for the check, and nothing on its way afterwards."""
    engine, _ = build_engine(
        llm.engine.graph, llm.model, llm.cache.layers, 16, EngineOptions(max_num_seqs=2), llm.device,
        content=llm.cache.content, record=True,
    )  # fmt: skip
    assert engine.loop is not None
    notes, made = list(engine.loop.notes), set(engine.loop.captures.made)
    assert "agree" in check_of(llm, engine)
    assert engine.loop.in_flight == [] and engine.loop.counts.replays == 0
    assert (engine.loop.notes, set(engine.loop.captures.made)) == (notes, made)
    assert set(engine.loop.packed.made) == {16}  # the prompt's step, which requests use as well


@pytest.mark.parametrize(
    "options", [{"max_num_batched_tokens": 2}, {"max_num_batched_tokens": 3}, {"max_num_seqs": 1}]
)
def test_engines_of_any_size_are_checked_or_say_why_not(llm, options):
    note = check_of(llm, resized(llm, **options).engine)
    assert ("not run" in note) == (options.get("max_num_batched_tokens") == 2)


def test_a_wrong_step_is_told_by_its_layer(llm):
    """The tolerance lies between rounding and an error in one layer of one step."""
    engine = resized(llm).engine
    graph, calls = engine.graph, []

    def wrong(*inputs):
        found = graph(*inputs)
        if inputs[0].shape[1] == 1:  # a decode step
            calls.append(1)
            engine.tensors[3][:] *= 1 + size
        return found

    engine.graph = wrong
    size = tolerance(torch.float32) / 50
    assert "agree" in check_of(llm, engine) and calls
    size = tolerance(torch.float32) * 4
    with pytest.raises(DecodeMismatch, match=r"the values of model\.layers\.1\.self_attn differ"):
        check_of(llm, engine)
    assert tolerance(torch.float32) < tolerance(torch.bfloat16) < tolerance(torch.float32, quantized=True)


def test_states_are_grouped_by_layer():
    assert by_layer(own_state(tiny("llama").module)) == ["past_key_values.layers 0, 1 (DynamicLayer: keys, values)"]


def test_the_tolerance_of_the_self_check_knows_of_routers():
    """What Moonlight's bfloat16 was seen to give is let through, layer by layer; float32 has no such room."""
    seen = {6: 0.12, 12: 0.23, 18: 0.35, 26: 0.44}
    allowed = {layer: tolerance(torch.bfloat16, layer=layer, routed=True) for layer in seen}
    assert all(seen[layer] < allowed[layer] < 0.7 for layer in seen)  # two rows that have nothing in common: 1.4
    assert tolerance(torch.bfloat16, layer=6) < seen[6]
    assert tolerance(torch.float32, layer=26, routed=True) == tolerance(torch.float32, layer=26)
