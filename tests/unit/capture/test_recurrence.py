"""Recurrent layers: what they keep is accounted for, tensor by tensor, and the captured graph is the model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.qwen3_next import modeling_qwen3_next

from conftest import graph_of, tiny
from graft.base.errors import UnsupportedState
from graft.capture.recurrence import conv_hook, graft_recurrence, rule_hook
from graft.capture.state import check_captured, check_state
from graft.ir.nodes import calls, is_op
from marks import short
from tiny_decoders import tiny_decoder

ops = torch.ops.graft
FAMILIES = {"lfm2": (3, 0), "qwen3-next": (3, 3)}  # convolutions and delta rules of the tiny model


@pytest.mark.parametrize("family", short(FAMILIES, "lfm2"))
def test_the_captured_graph_is_the_model(family):
    """Bit for bit, at lengths around the chunks of the delta rule."""
    module = tiny(family).module
    gm = graph_of(module)
    found = [sum(is_op(n, op.default) for n in calls(gm.graph)) for op in (ops.causal_conv, ops.gated_delta_rule)]
    assert tuple(found) == FAMILIES[family]
    for batch, length in ((1, 1), (2, 64), (1, 65), (3, 7)):
        ids = torch.randint(3, 128, (batch, length), generator=torch.Generator().manual_seed(length))
        with torch.no_grad():
            wanted = module(input_ids=ids, use_cache=False).logits
            (logits,) = gm(ids, torch.arange(length).expand(batch, -1))
        assert torch.equal(logits, wanted)


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_next"])
def test_every_state_is_accounted_for(kind):
    kept = check_state(tiny_decoder(kind))
    recurrent = {state.path: state.shape for state in kept if state.recurrent}
    assert all(state.recurrent or state.name in ("keys", "values") for state in kept)
    layers = [0, 2] if kind == "lfm2" else [0, 1, 2]
    names = ["conv_states[0]"] if kind == "lfm2" else ["conv_states[0]", "recurrent_states[0]"]
    assert set(recurrent) == {f"past_key_values.layers[{i}].{name}" for i in layers for name in names}


def test_a_window_that_the_convolution_does_not_get_is_refused(monkeypatch):
    """Equal numbers are not enough: what goes in must be what the cache gave."""
    convolve = modeling_lfm2.causal_conv1d_fn
    monkeypatch.setattr(modeling_lfm2.Lfm2ShortConv, "forward", other_window)
    assert convolve is modeling_lfm2.causal_conv1d_fn
    with pytest.raises(UnsupportedState, match=r"layers 0, 2 \(LinearAttentionLayer: conv_states\[0\]\)"):
        check_state(tiny_decoder("lfm2"))


def other_window(self, hidden_states, past_key_values=None, **_):
    x = self.in_proj(hidden_states).transpose(-1, -2).chunk(3, dim=-2)[0]
    if past_key_values is not None:
        x = past_key_values.update_conv_state(x, self.layer_idx, conv_kernel_size=self.conv_kernel_size) * 2
    y = modeling_lfm2.causal_conv1d_fn(x, self.conv.weight.squeeze(1), self.conv.bias)
    return self.out_proj(y[:, :, -hidden_states.shape[1] :].transpose(-1, -2))


def test_a_recurrent_state_that_is_changed_on_its_way_is_refused(monkeypatch):
    rule = modeling_qwen3_next.torch_chunk_gated_delta_rule
    update = modeling_qwen3_next.Qwen3NextGatedDeltaNet.forward

    def halved(self, hidden_states, cache_params=None, **options):
        if cache_params is not None:
            kept = cache_params.update_recurrent_state
            monkeypatch.setattr(
                cache_params, "update_recurrent_state", lambda states, *rest: kept(states / 2, *rest), raising=False
            )
        return update(self, hidden_states, cache_params=cache_params, **options)

    monkeypatch.setattr(modeling_qwen3_next.Qwen3NextGatedDeltaNet, "forward", halved)
    assert rule is modeling_qwen3_next.torch_chunk_gated_delta_rule
    with pytest.raises(UnsupportedState, match=r"layers 0, 1, 2 \(.*: conv_states\[0\], recurrent_states\[0\]\)"):
        check_state(tiny_decoder("qwen3_next"))


def test_a_state_without_its_op_in_the_graph_is_refused():
    module = tiny("lfm2").module
    kept, gm = check_state(module), graph_of(module)
    check_captured(module, kept, gm)
    more = next(state for state in kept if state.recurrent)
    with pytest.raises(UnsupportedState, match=r"it keeps conv_states of .* the captured graph has recurrences of"):
        check_captured(module, [*kept, more], gm)
    with pytest.raises(UnsupportedState, match="conv_states"):  # as many, of another width
        check_captured(module, [replace(s, shape=(1, 32, 4)) if s is more else s for s in kept], gm)


def test_functions_are_led_elsewhere_only_meanwhile_and_only_in_known_models():
    before = modeling_lfm2.causal_conv1d_fn
    with graft_recurrence(tiny("lfm2").module):
        assert modeling_lfm2.causal_conv1d_fn is conv_hook
    assert modeling_lfm2.causal_conv1d_fn is before
    with graft_recurrence(tiny_decoder("lfm2_moe")):
        assert modeling_lfm2.causal_conv1d_fn is before


def test_arguments_that_would_be_lost_are_refused_by_name():
    x, weight = torch.zeros(1, 4, 3), torch.zeros(4, 2)
    with pytest.raises(UnsupportedState, match="causal_conv1d_fn: the argument seq_idx"):
        conv_hook(x, weight, None, seq_idx=torch.zeros(1, 3))
    with pytest.raises(UnsupportedState, match="the activation 'relu'"):
        conv_hook(x, weight, None, "relu")
    heads, gates = torch.zeros(1, 3, 2, 4), torch.zeros(1, 3, 2)
    with pytest.raises(UnsupportedState, match="torch_chunk_gated_delta_rule: the argument initial_state"):
        rule_hook(heads, heads, heads, gates, gates, initial_state=torch.zeros(1, 2, 4, 4))
    with pytest.raises(UnsupportedState, match="cu_seqlens"):
        rule_hook(heads, heads, heads, gates, gates, cu_seqlens=torch.zeros(2))
