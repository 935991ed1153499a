"""Capture: every family, bit for bit, and nothing of attention dropped silently."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from transformers import AttentionInterface
from transformers.masking_utils import and_masks, causal_mask_function, or_masks, sliding_window_overlay

from conftest import FAMILIES, tiny
from graft.base.errors import CaptureError, UnsupportedAttention
from graft.capture.attention import CausalMask, attention_hook, graft_attention, recognise
from graft.capture.decoder import capture_decoder
from graft.ir.nodes import arg_values, calls, is_op, module_path, source_line
from graft.ir.trace import export_graph
from marks import short


def attention_nodes(gm):
    return [n for n in calls(gm.graph) if is_op(n, torch.ops.graft.attention.default)]


@cache
def captured(family):
    """Captured here, not read from the run's cache of graphs. Tests only look at it."""
    return capture_decoder(tiny(family).module)


@pytest.mark.some(1)
@pytest.mark.parametrize("family", short(FAMILIES, "llama", "gemma-2"))
def test_captured_graph_equals_the_model_bit_for_bit(family):
    """On shapes that are not the example's, longer than the tiny models' windows, and one token."""
    model = tiny(family)
    gm = captured(family)
    for batch, length in ((3, 21), (1, 5), (2, 1)):
        ids = torch.randint(3, 128, (batch, length), generator=torch.Generator().manual_seed(length))
        positions = torch.arange(length).expand(batch, -1)
        with torch.no_grad():
            expected = model.module(input_ids=ids, position_ids=positions, use_cache=False).logits
            (logits,) = gm(ids, positions)
        assert torch.equal(logits, expected), f"{batch} x {length}"


@pytest.mark.parametrize("family", short(FAMILIES, "llama", "gemma-2"))
def test_attention_keeps_what_the_model_gives_it(family):
    model = tiny(family)
    config = model.module.config
    nodes = attention_nodes(captured(family))
    assert len(nodes) == model.layers
    options = [{a.name: v for a, v in arg_values(n)} for n in nodes]
    assert all(o["mask"] is None and o["is_causal"] for o in options)
    kinds = getattr(config, "layer_types", None) or [None] * len(nodes)
    for kind, option in zip(kinds, options, strict=True):
        sliding = kind == "sliding_attention" or (kind is None and getattr(config, "sliding_window", None))
        assert option["window"] == (config.sliding_window if sliding else None)
        assert option["softcap"] == getattr(config, "attn_logit_softcapping", None)


def test_names_and_places_are_the_checkpoints():
    gm = captured("llama")
    names = {str(n.target) for n in gm.graph.nodes if n.op == "get_attr"}
    assert "model.layers.1.mlp.down_proj.weight" in names
    node = attention_nodes(gm)[1]
    assert module_path(node) == "model.layers.1.self_attn"
    assert source_line(node).startswith("modeling_llama.py:")


def test_weights_are_shared_not_copied():
    model = tiny("llama").module
    gm = captured("llama")
    assert gm.model.layers.get_submodule("0").mlp.up_proj.weight is model.model.layers[0].mlp.up_proj.weight


def test_the_model_is_left_as_it_was():
    model = tiny("llama").module
    captured("llama")
    assert model.config._attn_implementation == "sdpa" and not model.training


def fake_attention_call(**extra):
    q = torch.randn(1, 2, 3, 8)
    return attention_hook(torch.nn.Identity(), q, q, q, None, **extra)


def test_an_unknown_argument_is_an_error_with_the_modules_name():
    with pytest.raises(UnsupportedAttention, match=r"Identity: the argument position_bias"):
        fake_attention_call(position_bias=torch.ones(1))
    fake_attention_call(position_bias=None, use_cache=True)  # given but empty, and harmless ones


def test_the_modules_path_is_in_the_error():
    model = tiny("llama").module
    real = AttentionInterface._global_mapping["graft"]

    def with_bias(module, *args, **kwargs):
        return real(module, *args, relative_bias=1.5, **kwargs)

    AttentionInterface.register("graft", with_bias)
    try:
        with pytest.raises(CaptureError, match=r"model\.layers\.0\.self_attn.*relative_bias"):
            capture_decoder(model)
    finally:
        AttentionInterface.register("graft", real)


def test_dropout_and_disagreeing_windows_are_errors():
    with pytest.raises(UnsupportedAttention, match=r"model\.eval"):
        fake_attention_call(dropout=0.1)
    q, mask = torch.randn(1, 2, 3, 8), torch.ones(1, 1, 3, 3, dtype=torch.bool)
    mask.graft_tag = CausalMask(None)
    with pytest.raises(UnsupportedAttention, match="window None but it asks for 4"):
        attention_hook(torch.nn.Identity(), q, q, q, mask, sliding_window=4)


def test_masks_are_recognised_or_kept():
    window = and_masks(sliding_window_overlay(5), causal_mask_function)
    assert recognise(causal_mask_function) == CausalMask(None)
    assert recognise(window) == CausalMask(5)
    assert recognise(and_masks(window, sliding_window_overlay(3))) == CausalMask(3)
    assert recognise(or_masks(causal_mask_function, window)) is None
    assert recognise(sliding_window_overlay(5)) is None
    assert recognise(lambda b, h, q, k: k <= q) is None


def test_a_mask_of_its_own_is_kept_as_a_tensor():
    """A padding mask is not causal alone: attention keeps the tensor, and the numbers stay right."""
    model = tiny("llama").module

    class Padded(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids, mask):
            return self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits

    ids = torch.randint(3, 128, (2, 7))
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[0, :3] = 0
    with torch.no_grad(), graft_attention(model):
        gm = export_graph(Padded(), (ids, mask))
    node = attention_nodes(gm)[0]
    options = {a.name: v for a, v in arg_values(node)}
    assert options["mask"] is not None and options["is_causal"] is False
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(gm(ids, mask)[0, 3:], expected[0, 3:])


def test_a_module_that_cannot_be_captured_says_so():
    class Branches(torch.nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(CaptureError, match="could not capture Branches"):
        export_graph(Branches(), (torch.randn(3),))
