"""Families that graft cannot run, and what they lack; those whose values have smaller heads than their keys run."""

from __future__ import annotations

import pytest
import torch
from transformers import FalconConfig, FalconForCausalLM

from conftest import tiny
from graft.base.errors import TransformError, UnsupportedAttention
from graft.bench.limits.traffic import cache_bytes_per_token
from graft.capture.decoder import capture_decoder
from graft.ir.nodes import calls, is_op, tensor_of
from graft.passes.base import Context
from graft.passes.config import load_config
from graft.passes.pipeline import run_pipeline

ops = torch.ops.graft
EXPANDED = {"transforms": {"absorb_latent_attention": {"enabled": False}}}


def test_attention_of_its_own_is_refused_by_name():
    config = FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    with pytest.raises(UnsupportedAttention, match="FalconForCausalLM: it does not call Hugging Face's Attention"):
        capture_decoder(FalconForCausalLM(config).eval())


def heads(values: int):
    """A captured DeepSeek with other heads of values."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**tiny("deepseek-v3").family.tiny, "v_head_dim": values, "num_hidden_layers": 1}
    config = AutoConfig.for_model("deepseek_v3", **settings)
    return capture_decoder(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())


def test_values_are_filled_up_to_the_heads_of_keys():
    """Keys of 16 + 8, values of 16: both caches have heads of 24, and the result is cut to 16."""
    gm = heads(16)
    run_pipeline(gm, load_config(EXPANDED), Context(route="decoder", context_length=64))
    (attention,) = [node for node in calls(gm.graph) if is_op(node, ops.paged_attention.default)]
    assert [tensor_of(attention.args[i]).shape[-1] for i in range(5)] == [24] * 5
    (cut,) = attention.users
    assert tensor_of(attention).shape[-1] == 24 and tensor_of(cut).shape[-1] == 16
    assert cache_bytes_per_token(tiny("deepseek-v3").module) == 2 * 4 * 24 * 4


def test_values_with_larger_heads_are_refused():
    with pytest.raises(TransformError, match="heads of keys are smaller than those of values, 24 and 32"):
        run_pipeline(heads(32), load_config(EXPANDED), Context(route="decoder", context_length=64))
