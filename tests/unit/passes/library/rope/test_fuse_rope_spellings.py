"""fuse_rope: every spelling of a rotation becomes the op."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.cohere import modeling_cohere
from transformers.models.cohere2 import modeling_cohere2
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.ernie4_5 import modeling_ernie4_5
from transformers.models.glm import modeling_glm
from transformers.models.glm4 import modeling_glm4
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama
from transformers.models.llama4 import modeling_llama4
from transformers.models.nemotron import modeling_nemotron
from transformers.models.olmo2 import modeling_olmo2
from transformers.models.persimmon import modeling_persimmon
from transformers.models.phi import modeling_phi
from transformers.models.stablelm import modeling_stablelm

from graft.capture.decoder import capture_decoder
from graft.ir.nodes import calls, is_op
from graft.ops.cases import tolerance
from graft.passes.config import load_config
from graft.passes.pipeline import run_pipeline
from graft.passes.registry import TransformRegistry
from marks import crossed
from rope_cases import (
    DTYPES,
    B,
    D,
    H,
    R,
    S,
    angles,
    every_two,
    fuse,
    llama,
    meta_heads_first,
    randn,
    ropes,
    unbound_parts,
)

# ── Hugging Face's functions: name → (function of q, k, cos, sin; r; float32 angles beside 16-bit heads; in pairs)

HUGGING_FACE = {
    "llama": (modeling_llama.apply_rotary_pos_emb, D, False, False),
    "stablelm": (modeling_stablelm.apply_rotary_pos_emb, D, False, False),
    "persimmon": (modeling_persimmon.apply_rotary_pos_emb, D, False, False),
    "olmo2": (modeling_olmo2.apply_rotary_pos_emb, D, True, False),
    "gpt_neox": (modeling_gpt_neox.apply_rotary_pos_emb, R, False, False),
    "nemotron": (modeling_nemotron.apply_rotary_pos_emb, R, False, False),
    "phi": (modeling_phi.apply_rotary_pos_emb, D, False, False),
    "cohere": (modeling_cohere.apply_rotary_pos_emb, D, False, True),
    "cohere, float32 angles": (modeling_cohere.apply_rotary_pos_emb, D, True, True),
    "cohere2": (modeling_cohere2.apply_rotary_pos_emb, D, False, True),
    "glm": (modeling_glm.apply_rotary_pos_emb, R, False, True),
    "glm4": (modeling_glm4.apply_rotary_pos_emb, R, False, True),
    "glm, whole head": (modeling_glm.apply_rotary_pos_emb, D, False, True),
    "ernie4_5": (modeling_ernie4_5.apply_rotary_pos_emb, D, False, True),
    "ernie4_5, float32 angles": (modeling_ernie4_5.apply_rotary_pos_emb, D, True, True),
    "gpt_oss": (modeling_gpt_oss.apply_rotary_pos_emb, D // 2, False, False),
    "deepseek_v3": (modeling_deepseek_v3.apply_rotary_pos_emb, D, False, False),
    "deepseek_v3, pairs to halves": (modeling_deepseek_v3.apply_rotary_pos_emb_interleave, D, False, False),
}


@pytest.mark.some(9)
@crossed("name", HUGGING_FACE, DTYPES)
def test_hugging_face_functions_fuse_bit_for_bit(name, dtype):
    function, r, wide, interleaved = HUGGING_FACE[name]
    cos, sin = angles(B, S, r, dtype=torch.float32 if wide else dtype)
    args = (randn(B, H, S, D, dtype=dtype), randn(B, 1, S, D, dtype=dtype), cos, sin)
    expected = function(*args)
    gm, record, _ = fuse(function, args)
    assert len(record.matches) == 2 and not record.near_misses, record
    for got, wanted in zip(gm(*args), expected, strict=True):
        assert torch.equal(got, wanted) and got.dtype == wanted.dtype
    assert [node.args[3:] == (True,) for node in ropes(gm)] == [interleaved] * 2


@pytest.mark.some(6)
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_dynamic_batch_and_length_fuse_too(name):
    """Sizes of reshapes are then computed in the graph."""
    function, r, _, _ = HUGGING_FACE[name]
    cos, sin = angles(B, S, r)
    args = (randn(B, H, S, D), randn(B, H, S, D, seed=3), cos, sin)
    b, s = Dim("b", min=2), Dim("s", min=2)
    heads, tokens = {0: b, 2: s}, {0: b, 1: s}
    gm, record, _ = fuse(function, args, dynamic_shapes=((heads, heads, tokens, tokens),))
    assert len(record.matches) == 2, record
    longer = (randn(3, H, 9, D), randn(3, H, 9, D, seed=3), *angles(3, 9, r))
    assert all(torch.equal(a, b) for a, b in zip(gm(*longer), function(*longer), strict=True))


MODELS = {
    "glm4": {"head_dim": 16},
    "cohere": {},
    "llama4_text": {"head_dim": 16, "intermediate_size_mlp": 64, "num_local_experts": 2},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", MODELS)
def test_whole_models_fuse_every_query_and_key(kind):
    """As their attention calls them, captured with dynamic batch and length."""
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **heads, **MODELS[kind])).eval()
    ids, positions = torch.randint(3, 128, (2, 13)), torch.arange(13).expand(2, -1)
    gm = capture_decoder(model)
    config = load_config({"transforms": {n: {"enabled": n == "fuse_rope"} for n in TransformRegistry.names()}})
    record = run_pipeline(gm, config).transforms["fuse_rope"]
    assert len(record.matches) == 2 and not record.near_misses
    with torch.no_grad():
        expected = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(gm(ids, positions)[0], expected, rtol=1e-5, atol=1e-5)


# ── other spellings: name → (function of x, cos, sin; shape of x; shape of cos; in pairs) ───────────────────────


def unbound(x, cos, sin):
    x1, x2 = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return x * cos + torch.stack((-x2, x1), -1).reshape(x.shape) * sin


def selected_parts(x, cos, sin):
    pairs = x.unflatten(-1, (-1, 2))
    x1, x2 = pairs[..., 0], pairs[..., 1]
    return torch.stack((x1 * cos + -x2 * sin, cos * x2 + sin * x1), -1).flatten(-2)


def split_parts(x, cos, sin):
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)


def projected(x, cos, sin):
    """The reshape to heads and the one to pairs are both of the projection's result."""
    return unbound(x.reshape(*x.shape[:2], H, D), cos, sin)


def projected_parts(x, cos, sin):
    return unbound_parts(x.reshape(*x.shape[:2], H, D), cos, sin)


def upcast_partial(x, cos, sin):
    wide = x.float()
    return torch.cat((llama(wide[..., :R], cos, sin), wide[..., R:]), -1).to(x.dtype)


def cast_before_the_rest(x, cos, sin):
    turning, rest = x.split([R, D - R], -1)
    return torch.cat(((turning.float() * cos + every_two(turning.float()) * sin).to(x.dtype), rest), -1)


def minus_the_other_way(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos - torch.cat((x[..., half:], -x[..., :half]), -1) * sin


def rest_on_the_left(x, cos, sin):
    return torch.cat((x[..., :-R], llama(x[..., -R:], cos, sin)), -1)


SPELLINGS = {
    "heads last, halves": (llama, (B, S, H, D), (B, S, 1, D), False),
    "heads last, pairs": (lambda x, c, s: x * c + every_two(x) * s, (B, S, H, D), (B, S, 1, D), True),
    "angles of rank 2": (llama, (B, H, S, D), (S, D), False),
    "angles of rank 3": (llama, (B, H, S, D), (1, S, D), False),
    "angles shared by the batch": (llama, (B, H, S, D), (1, 1, S, D), False),
    "operands swapped": (lambda x, c, s: s * every_two(x) + c * x, (B, H, S, D), (B, 1, S, D), True),
    "reshape and unbind": (unbound, (B, H, S, D), (B, 1, S, D), True),
    "parts, unbind": (unbound_parts, (B, H, S, D), (B, 1, S, D // 2), True),
    "parts, unflatten and select": (selected_parts, (B, S, H, D), (B, S, 1, D // 2), True),
    "parts, chunk, x upcast": (split_parts, (B, H, S, D), (B, 1, S, D // 2), False),
    "reshape and unbind of a projection": (projected, (B, S, H * D), (B, S, 1, D), True),
    "parts of a projection": (projected_parts, (B, S, H * D), (S, 1, D // 2), True),
    "partial, x upcast first": (upcast_partial, (B, H, S, D), (B, 1, S, R), False),
    "partial, cast before the rest": (cast_before_the_rest, (B, H, S, D), (B, 1, S, R), True),
    "minus the other way round": (minus_the_other_way, (B, H, S, D), (B, 1, S, D), False),
    "rest on the left": (rest_on_the_left, (B, H, S, D), (B, 1, S, R), False),
    "scaled angles": (lambda x, c, s: llama(x, c * 1.25, s * 1.25), (B, H, S, D), (B, 1, S, D), False),
}


@pytest.mark.some(9)
@crossed("name", SPELLINGS, DTYPES)
def test_spellings_fuse_bit_for_bit(name, dtype):
    function, shape, angle_shape, interleaved = SPELLINGS[name]
    args = (randn(*shape, dtype=dtype), *angles(*angle_shape, dtype=dtype))
    gm, record, _ = fuse(function, args)
    assert len(record.matches) == 1 and not record.near_misses, record
    assert torch.equal(gm(*args), function(*args)) and gm(*args).dtype == function(*args).dtype
    (rope,) = ropes(gm)
    assert (rope.args[3:] == (True,)) == interleaved
    wrong = (args[0], args[1], -args[2])
    assert not torch.allclose(gm(*wrong), function(*args), rtol=0.01, atol=0.01), "the test can fail"


@pytest.mark.parametrize("dtype", DTYPES)
def test_gptj_fuses_in_its_own_layout(dtype):
    """x is [b, s, h, r]; only the first values of a head are given to the function."""

    def attention(x, sin, cos):
        return torch.cat((modeling_gptj.apply_rotary_pos_emb(x[..., :R], sin, cos), x[..., R:]), dim=-1)

    cos, sin = angles(B, S, R // 2, dtype=dtype)
    args = (randn(B, S, H, D, dtype=dtype), sin, cos)
    gm, record, _ = fuse(attention, args)
    assert [match.pattern for match in record.matches] == ["interleaved whole, partial"]
    assert torch.equal(gm(*args), attention(*args))


def meta(x, freqs):
    """Meta's reference code: x [b, s, h, d], freqs [s, d/2]."""
    turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * freqs.view(1, x.shape[1], 1, -1)
    return torch.view_as_real(turned).flatten(3).type_as(x)


def meta_projected(x, freqs):
    return meta(x.view(*x.shape[:2], H, D), freqs)


COMPLEX = {
    "meta": (meta, (B, S, H, D), (S, D // 2)),
    "meta, of a projection": (meta_projected, (B, S, H * D), (S, D // 2)),
    "heads first": (meta_heads_first, (B, H, S, D), (S, D // 2)),
    "heads first, angles a sequence": (meta_heads_first, (B, H, S, D), (B, 1, S, D // 2)),
    "llama4": (lambda x, f: modeling_llama4.apply_rotary_emb(x, x.exp(), f)[0], (B, S, H, D), (B, S, D // 2)),
}


@crossed("name", COMPLEX, DTYPES)
def test_complex_spelling_fuses_within_float32_rounding(name, dtype):
    function, shape, angle_shape = COMPLEX[name]
    freqs = torch.polar(torch.ones(angle_shape), randn(*angle_shape, seed=7))
    args = (randn(*shape, dtype=dtype), freqs)
    gm, record, _ = fuse(function, args)
    assert record.matches and not record.near_misses, record
    assert all(node.args[3:] == (True,) for node in ropes(gm))
    bound, expected = tolerance(dtype, 2), function(*args)
    torch.testing.assert_close(gm(*args), expected, rtol=bound, atol=bound)
    assert not torch.allclose(gm(args[0], freqs.conj().resolve_conj()), expected, rtol=bound, atol=bound)


def test_complex_spelling_with_dynamic_sizes():
    b, s = Dim("b", min=2), Dim("s", min=2)
    freqs = torch.polar(torch.ones(B, S, D // 2), randn(B, S, D // 2))
    args = (randn(B, S, H, D), randn(B, S, H, D, seed=3), freqs)
    gm, record, _ = fuse(modeling_llama4.apply_rotary_emb, args, dynamic_shapes=(({0: b, 1: s},) * 3,))
    assert len(record.matches) == 2
    expected = modeling_llama4.apply_rotary_emb(*args)
    torch.testing.assert_close(gm(*args), list(expected), rtol=tolerance(torch.float32, 2), atol=1e-6)


def test_written_out_angles_are_shared_between_layers():
    """Angles of r/2 values are written out once, not once a layer, and stand below what they are made from."""

    def layers(x, cos, sin):
        for _ in range(4):
            x = unbound_parts(x, cos, sin).tanh()
        return x

    args = (randn(B, H, S, D), *angles(B, 1, S, D // 2))
    gm, record, _ = fuse(layers, args)
    assert len(record.matches) == 4
    assert sum(is_op(n, torch.ops.aten.repeat_interleave.self_int) for n in calls(gm.graph)) == 2
    assert torch.equal(gm(*args), layers(*args))


def test_two_rotations_in_a_row_both_fuse():
    args = (randn(B, H, S, D), *angles(B, 1, S, D))
    gm, record, _ = fuse(lambda x, c, s: llama(llama(x, c, s), c, s), args)
    assert len(record.matches) == 2
    assert torch.equal(gm(*args), llama(llama(*args), *args[1:]))
