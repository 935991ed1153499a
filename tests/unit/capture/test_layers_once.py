"""Decoders captured by a few layers: the graph is that of the whole capture, or the decoder is captured whole."""

from __future__ import annotations

import copy
import json
import re
from functools import cache
from unittest import mock

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel, LlamaRotaryEmbedding

from conftest import FAMILIES
from graft.capture import layers_once
from graft.capture.decoder import capture_decoder
from graft.capture.layer_kinds import NoKinds, layer_kinds
from graft.capture.layers_once import capture_layers_once, export_few
from graft.capture.repeat_layers import repeat_layers
from graft.capture.skipped_layers import LayerNumber
from graft.ir.verify import module_state
from layer_cases import data_of, deep, numbered
from marks import left_out


def few(model, found):
    return data_of(export_few(model, found))


@pytest.mark.exhaustive  # the next one compares with a whole capture, too
@pytest.mark.parametrize("family", FAMILIES)
def test_the_graph_is_that_of_the_whole_capture(family):
    model = deep(family, 6 if family == "llama" else 12)
    found = layer_kinds(model)
    assert 2 * len(found.chosen) <= len(found.kinds)
    assert numbered(repeat_layers(few(model, found), found)) == numbered(data_of(capture_decoder(model)))


def attention_alone(self, hidden_states, attention_mask=None, position_embeddings=None, **_):
    """A layer of few operations, which is captured in a third of the time."""
    attends = self.self_attn
    projected = [project(hidden_states) for project in (attends.q_proj, attends.k_proj, attends.v_proj)]
    heads = [each.unflatten(-1, (-1, attends.head_dim)).transpose(1, 2) for each in projected]
    attend = ALL_ATTENTION_FUNCTIONS[attends.config._attn_implementation]
    mixed, _ = attend(attends, *heads, attention_mask, scaling=attends.scaling)
    return hidden_states + attends.o_proj(mixed.flatten(2)) * position_embeddings[0].sum()


def test_a_layer_that_is_not_like_the_others_is_captured(monkeypatch):
    monkeypatch.setattr(LlamaDecoderLayer, "forward", attention_alone)
    model = deep("llama", 8)
    model.model.layers[5].self_attn.scaling = 0.3
    found = layer_kinds(model)
    assert found.chosen == (0, 1, 5, 7)
    whole = numbered(data_of(capture_decoder(model)))
    data = few(model, found)
    other = json.loads(re.sub(r"\b0\.3(?=[,}\]])", "0.4", json.dumps(data)))
    assert other != data
    assert numbered(repeat_layers(data, found)) == whole
    assert numbered(repeat_layers(other, found)) != whole


@pytest.mark.parametrize(
    ("family", "count", "chosen"), [("llama", 6, "3"), left_out(("gemma-2", 12, "6"))]
)  # gemma-2: layers of two kinds, with and without a window
def test_results_are_those_of_the_model_and_the_model_is_as_it_was(family, count, chosen):
    model = deep(family, count)
    layers, config = model.model.layers, copy.deepcopy(model.config)
    gm, how = capture_layers_once(model)
    assert model.model.layers is layers and len(layers) == count and model.config.to_dict() == config.to_dict()
    assert how == f"{chosen} of {count} layers, which the others are like"
    ids, positions = torch.randint(3, 100, (2, 21)), torch.arange(21).expand(2, -1)
    model.set_attn_implementation("eager")  # sdpa leaves out Gemma 2's soft cap
    with torch.no_grad():
        found, expected = gm(ids, positions)[0], model(input_ids=ids, position_ids=positions).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert [type(layer.self_attn.layer_idx) for layer in layers] == [int] * count
    known = module_state(model)
    assert all(tensor is known[name] for name, tensor in module_state(gm).items())


def test_a_tensor_that_a_program_makes_is_not_lost(monkeypatch):
    """A constant of the graph has no name in the model: the decoder is captured whole."""
    plain = LlamaRotaryEmbedding.forward

    def forward(self, *args, **kwargs):
        cos, sin = plain(self, *args, **kwargs)
        return cos * torch.tensor([1.0, 2.0] * 4), sin

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", forward)
    monkeypatch.setattr(LlamaDecoderLayer, "forward", attention_alone)
    gm, how = capture_layers_once(deep("llama", 6))
    assert how.startswith("layer by layer, because ") and how.endswith("is neither a parameter nor a buffer of it")
    assert not any(tensor.is_meta for tensor in module_state(gm).values())


def test_the_model_is_as_it_was_when_the_capture_fails():
    model = deep("llama", 8)
    layers = model.model.layers
    with mock.patch.object(layers_once, "export_decoder", side_effect=ValueError), pytest.raises(ValueError):
        capture_layers_once(model)
    assert model.model.layers is layers and type(layers[0].self_attn.layer_idx) is int


def test_a_program_that_computes_with_the_number_of_a_layer_is_captured_whole(monkeypatch):

    def forward(self, hidden_states, *args, **kwargs):
        scale = 2.0 if self.self_attn.layer_idx == 3 else 1.0  # which is not captured
        return attention_alone(self, hidden_states * scale, *args, **kwargs)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", forward)
    model = deep("llama", 6)
    gm, how = capture_layers_once(model)
    assert how == "layer by layer, because it looks at the number of a layer (eq)"
    factors = [node.args[1] for node in gm.graph.nodes if node.target is torch.ops.aten.mul.Tensor]
    assert factors.count(2.0) == 1


@pytest.mark.parametrize("name", ["add", "mod", "lt", "eq", "float", "str", "rsub", "index", "hash"])
def test_whoever_looks_at_a_number_is_noted(name):
    problems = []
    number = LayerNumber(3, problems.append)
    one = name in ("float", "str", "index", "hash")
    assert number is not None and not problems
    assert getattr(number, f"__{name}__")(*([] if one else [2])) == getattr(3, f"__{name}__")(*([] if one else [2]))
    assert problems == [f"it looks at the number of a layer ({name})"]
    assert "abcd"[number] == "d"


@pytest.mark.exhaustive
def test_layers_alike_that_are_given_other_values_are_captured_whole(monkeypatch):
    """The model's own loop decides by the number of a layer that is not captured."""

    def forward(self, input_ids, position_ids, **_):
        x = self.embed_tokens(input_ids)
        cos, sin = self.rotary_emb(x, position_ids)
        for number, layer in enumerate(self.layers):
            given = (cos, sin) if number != 4 else (sin, cos)
            x = layer(x, attention_mask=None, position_ids=position_ids, position_embeddings=given)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x))

    monkeypatch.setattr(LlamaModel, "forward", forward)
    model = deep("llama", 6)
    with pytest.raises(NoKinds, match="layers that are alike are given other values"):
        export_few(model, layer_kinds(model))


def sharing(model):
    model.model.layers[3].mlp = model.model.layers[2].mlp


def all_different(model):
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.scaling = 0.1 * number


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (sharing, "its layers share weights"),
        (all_different, "its 8 layers are of 8 kinds"),
        (lambda model: setattr(model, "more", copy.deepcopy(model.model.layers)), "it has 2 lists of layers"),
        (lambda model: setattr(model.model, "layers", model.model.layers[:5]), "^$"),
    ],
)
def test_decoders_without_kinds_say_why(change, reason):
    model = deep("llama", 8)
    change(model)
    with pytest.raises(NoKinds, match=reason):
        layer_kinds(model)


@cache
def two_kinds():
    """Captured once: layers 5 and 8 are like each other. Whoever changes the data takes a copy."""
    model = deep("llama")
    model.model.layers[5].self_attn.scaling = model.model.layers[8].self_attn.scaling = 0.3
    found = layer_kinds(model)
    data = few(model, found)
    repeat_layers(copy.deepcopy(data), found)
    return found, data


def literal(data):
    node = [entry for entry in data["nodes"] if "aten.add.Tensor" in entry["target"] and entry["args"][1] == 1e-06]
    node[-2]["args"][1] = 1e-05  # a norm of the last layer


def between(data):
    node = next(entry for entry in data["nodes"] if entry["modules"] and entry["modules"][-1][1] == "model.layers.1")
    node["modules"] = node["modules"][:3]


def shortcut(data):
    """The last layer reads what the first gives to the second."""
    first, last = (
        next(e for e in data["nodes"] if e["modules"] and e["modules"][-1][1] == f"model.layers.{at}.input_layernorm")
        for at in (1, 11)
    )
    last["args"][0] = first["args"][0]


def weight_elsewhere(data):
    """The head reads a weight of a layer."""
    head = next(entry for entry in data["nodes"] if {"node": "lm_head_weight"} in entry["args"])
    head["args"][1] = {"node": "model_layers_11_mlp_down_proj_weight"}


def other_form(data):
    """The first layer gives something narrower."""
    first = [entry for entry in data["nodes"] if entry["modules"] and entry["modules"][-1][1] == "model.layers.0"]
    first[-1]["val"]["tensor"]["dtype"] = "bfloat16"


def value_of_the_second(data):
    """Layers of another kind read what the second computes: is it not what the fourth computes?"""
    made, *readers = (
        next(entry for entry in data["nodes"] if f"layers.{at}.mlp.act_fn" in str(entry["modules"]))
        for at in (1, 5, 8)
    )
    for reader in readers:
        reader["args"][0] = {"node": made["name"]}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (literal, "of layers alike, differ"),
        (between, "is between its layers"),
        (shortcut, "go from a layer to the next"),
        (weight_elsewhere, "model_layers_11_mlp_down_proj_weight is read outside of its layer"),
        (other_form, "its layers give values of several forms"),
        (value_of_the_second, "layer 5 reads a value of layer 1"),
    ],
)
def test_layers_that_are_not_alike_after_all_are_found(change, reason):
    found, data = two_kinds()
    data = copy.deepcopy(data)
    change(data)
    with pytest.raises(NoKinds, match=reason):
        repeat_layers(data, found)
