"""fuse_attention on whole Hugging Face decoders, captured without graft's hook: every layer, the same logits."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

import graft
from attention_cases import fuse
from conftest import graph_of, tiny
from graft.ir.nodes import calls, is_op, options_of
from graft.passes.base import Context
from graft.passes.config import load_config
from graft.passes.pipeline import run_pipeline
from marks import short

WINDOW, CAP = 5, 50.0
BASE = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2},
}
# name → config, and each layer's window and soft cap
MODELS = {
    "llama": (transformers.LlamaConfig, {}, [(None, None)] * 2),
    "mistral": (transformers.MistralConfig, {"sliding_window": WINDOW}, [(WINDOW, None)] * 2),
    "gemma2": (
        transformers.Gemma2Config,
        {"sliding_window": WINDOW, "query_pre_attn_scalar": 16},
        [(WINDOW, CAP), (None, CAP)],
    ),
    "gpt_oss": (
        transformers.GptOssConfig,
        {
            **{"sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1},
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        [(WINDOW, None), (None, None)],
    ),
}
CASES = [(name, "eager", dtype) for name in MODELS for dtype in (torch.float32, torch.bfloat16)]
CASES += [("llama", "sdpa", torch.float32), ("mistral", "sdpa", torch.bfloat16), ("gemma2", "sdpa", torch.float32)]


class Logits(nn.Module):
    def __init__(self, name, how, dtype):
        super().__init__()
        kind, more, self.layers = MODELS[name]
        torch.manual_seed(0)
        config = kind(**BASE, **more, attn_implementation=how)
        self.model = transformers.AutoModelForCausalLM.from_config(config).eval().to(dtype)

    def forward(self, ids):
        return self.model(input_ids=ids, use_cache=False).logits


def distance(got, expected):
    """Of two tensors, against the size of the second."""
    return ((got.float() - expected.float()).norm() / expected.float().norm()).item()


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("name", "how", "dtype"),
    short(
        CASES,
        ("gemma2", "eager", torch.bfloat16),
        ("gpt_oss", "eager", torch.bfloat16),
        ("llama", "sdpa", torch.float32),
    ),
    ids=lambda case: str(case).removeprefix("torch."),
)
def test_every_layer_of_a_decoder(name, how, dtype):
    """float32 with dynamic sizes, bfloat16 with the example's."""
    module, dynamic = Logits(name, how, dtype), dtype == torch.float32
    ids, other = torch.randint(0, 64, (2, 9)), torch.randint(0, 64, (3, 14))
    shapes = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},) if dynamic else None
    gm, record, _ = fuse(module, (ids,), dynamic_shapes=shapes)
    assert (len(record.matches), record.near_misses) == (2, ())
    nodes = [n for n in calls(gm.graph) if is_op(n, torch.ops.graft.attention.default)]
    for node, (window, cap) in zip(nodes, module.layers, strict=True):
        given = options_of(node)
        assert (given["mask"], given["is_causal"], given["window"]) == (None, True, window)
        assert given["softcap"] == (cap if how == "eager" else None)  # Hugging Face's sdpa leaves the cap out
        assert given["k"].meta["val"].shape[1] == 2 and (given["sinks"] is not None) == (name == "gpt_oss")
    with torch.no_grad():
        for given_ids in (ids, other) if dynamic else (ids,):
            got, expected = gm(given_ids), module(given_ids)
            if dtype == torch.float32:
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
            else:
                assert distance(got, expected) < 0.02
        nodes[0].args = (*nodes[0].args[:4], nodes[0].args[4] * 1.3, *nodes[0].args[5:])
        gm.recompile()
        assert distance(gm(ids), module(ids)) > 0.02  # a wrong scale in one layer is seen


@pytest.mark.exhaustive
def test_a_decoder_captured_by_the_hook_has_attention_already():
    gm = graph_of(tiny("llama").module)
    record = run_pipeline(gm, load_config(), Context(route="decoder")).transforms["fuse_attention"]
    assert (record.status, record.reason) == ("no_match", "attention is graft::attention already")


@pytest.mark.exhaustive
def test_routers_beside_graft_attention_are_no_near_misses():
    gm = graph_of(tiny("qwen3-moe").module)
    record = run_pipeline(gm, load_config(), Context(route="decoder")).transforms["fuse_attention"]
    assert (record.near_misses, record.reason) == ((), "attention is graft::attention already")


def test_compile_fuses_attention_of_any_module():
    module = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0).eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        torch.testing.assert_close(graft.compile(module, (x,), backend="eager")(x), module(x), rtol=1e-5, atol=1e-5)
    block = Logits("llama", "eager", torch.float32)
    ids = torch.randint(0, 64, (2, 9))
    compiled = graft.compile(block, (ids,), backend="eager")
    counts = {name: len(record.matches) for name, record in compiled.report.transforms.items()}
    assert (counts["fuse_attention"], counts["merge_qkv"], counts["fuse_rope"]) == (2, 2, 4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids), block(ids), rtol=1e-5, atol=1e-5)
