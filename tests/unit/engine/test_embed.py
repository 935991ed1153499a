"""Vectors of prompts against Hugging Face's hidden states, however they are batched, chunked, found or preempted."""

from __future__ import annotations

import json
import random

import pytest
import torch

import graft
from embedding_cases import LAST, MEAN, embedder, hidden_states, unit
from graft.base.errors import ArtifactError, CheckpointError, DecodeMismatch, EmptyPrompt, PromptTooLong, UsageError
from graft.engine.pooling import PoolingEngine
from graft.engine.setup import self_check
from marks import short

FAR = 2e-5


def prompts(*lengths):
    source = random.Random(5)
    return [[source.randrange(3, 300) for _ in range(length)] for length in lengths]


def vectors(outputs):
    assert all(one.error is None for one in outputs)
    return [torch.tensor(one.embedding) for one in outputs]


def near(found, expected):
    return all(torch.allclose(a, b, atol=FAR, rtol=0) for a, b in zip(found, expected, strict=True))


def load(folder, **options):
    return graft.LLM(folder, dtype="float32", runner="pooling", use_cache=False, **options)


@pytest.mark.parametrize(
    ("kind", "backend"), short([("qwen3", "native"), ("mistral", "eager"), ("gemma2", "eager")], ("qwen3", "native"))
)
def test_last_tokens_are_those_of_the_base_model(tmp_path, kind, backend):
    folder = embedder(tmp_path / "m", kind, pooling=LAST, tie_word_embeddings=kind == "gemma2")
    asked = prompts(1, 2, 7, 40, 33, 128)
    found = vectors(load(folder, backend=backend).embed(asked))
    states = hidden_states(folder, asked)
    assert near(found, [unit(each[-1]) for each in states])
    assert not near(found[1:], [unit(each[-2]) for each in states[1:]])  # a tolerance for any token would be none
    assert not near(found[1:], [unit(each.mean(0)) for each in states[1:]])


@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 7}, {"kv_cache_memory": "96KiB", "max_num_seqs": 8}]
)
@pytest.mark.parametrize("pooling", [LAST, MEAN], ids=["last", "mean"])
def test_company_chunks_and_a_small_cache_change_nothing(tmp_path, pooling, options):
    folder = embedder(tmp_path / "m", pooling=pooling, steps=("Transformer", "Pooling"))
    llm = load(folder, backend="eager", **options)
    asked = prompts(40, 1, 33, 64, 90, 17, 5, 40)
    asked += [asked[3] + [9], asked[3]]  # what begins alike, and what was there before
    states = hidden_states(folder, asked)
    right = [each[-1] if pooling is LAST else each.mean(0) for each in states]
    for _ in range(2):  # the second time from the cache, where it is of use
        found = llm.embed(asked)
        assert near(vectors(found), right)
        assert not near(vectors(found), [unit(one) for one in right])  # there is no Normalize step
    assert all(one.cached_tokens == 0 for one in found) if pooling is MEAN else found[-1].cached_tokens >= 48
    manager = llm.engine.manager
    manager.check()
    assert llm.engine.idle and manager.available == manager.blocks


@pytest.mark.exhaustive
def test_a_folder_without_a_head_has_none_made_up(tmp_path):
    bare = embedder(tmp_path / "bare", "qwen3", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"lm_head.weight, .* --runner pooling"):
        graft.LLM(bare, dtype="float32", use_cache=False)
    llm = load(bare, backend="eager")
    assert any("no lm_head.weight" in note for note in llm.report.notes)
    assert llm.model.module.lm_head.weight is llm.model.module.get_input_embeddings().weight
    shared = [node for node in llm.graph_module.graph.nodes if "lm_head" in str(node.target)]
    assert [user.target for node in shared for user in node.users] == [torch.ops.aten.embedding.default]
    with_head = embedder(tmp_path / "head", "qwen3", head=True, tie_word_embeddings=False)
    other = load(with_head, backend="eager")
    asked = prompts(9)
    assert near(vectors(other.embed(asked)), [unit(hidden_states(with_head, asked)[0][-1])])
    assert other.report.transforms["last_token_logits"].matches and any(
        "is left out" in note for note in other.report.notes
    )
    assert not any(str(n.target).endswith("lm_head.weight") for n in other.graph_module.graph.nodes)


@pytest.mark.exhaustive
def test_a_folder_of_its_own_kind_and_one_that_generates(tmp_path):
    folder = embedder(tmp_path / "m", head=True)
    llm = load(folder, backend="eager")
    assert any("pooling: the last token" in note and "by default" in note for note in llm.report.notes)
    assert any(note.startswith("self-check: 7 tokens") for note in llm.report.notes)
    with pytest.raises(UsageError, match="use embed"):
        llm.generate([[5]])
    with pytest.raises(ArtifactError, match="cannot be written"):
        llm.save(tmp_path / "saved")
    generating = graft.LLM(folder, dtype="float32", use_cache=False)
    with pytest.raises(UsageError, match='runner="pooling"'):
        generating.embed([[5]])
    with pytest.raises(UsageError, match="runner"):
        graft.LLM(folder, runner="poolin")


def test_prompts_that_cannot_run_do_not_stop_others(tmp_path):
    llm = load(embedder(tmp_path / "m"), backend="eager")
    long, empty, fits = llm.embed([[5] * 129, [], [5] * 128])
    assert isinstance(long.error, PromptTooLong) and isinstance(empty.error, EmptyPrompt)
    assert "new" not in str(long.error) and len(fits.embedding) == 64
    with pytest.raises(EmptyPrompt):
        llm.embed([[]])
    assert llm.embed("Hello")[0].prompt_token_ids == llm.encode("Hello")


def test_what_is_not_finite_ends_its_own_request(tmp_path):
    llm = load(embedder(tmp_path / "m"), backend="eager", self_check=False)
    weight = llm.model.module.get_input_embeddings().weight
    with torch.no_grad():
        weight[7] = float("nan")
    wrong, right = llm.embed([[5, 7], [5, 6]])
    assert "not finite" in str(wrong.error) and not wrong.embedding and right.error is None


def test_a_state_that_is_lost_between_chunks_is_found_at_load(tmp_path, monkeypatch):
    folder = embedder(tmp_path / "m")
    honest = PoolingEngine.run

    def forgets(self, plan, *arguments, **options):
        found = honest(self, plan, *arguments, **options)
        return found + 0.01 if plan.requests[0].computed else found

    monkeypatch.setattr(PoolingEngine, "run", forgets)
    with pytest.raises(DecodeMismatch, match="2 tokens at a time"):
        load(folder, backend="eager")
    assert self_check.STEPS == 2


@pytest.mark.parametrize(
    ("pooling", "steps", "said"),
    [
        ({"pooling_mode_cls_token": True}, ("Transformer", "Pooling"), "pooling by cls_token is not supported"),
        ({**LAST, "pooling_mode_max_tokens": True}, ("Transformer", "Pooling"), "pooling by lasttoken, max"),
        ({"pooling_mode": "weightedmean"}, ("Transformer", "Pooling"), "pooling by weightedmean"),
        ({}, ("Transformer", "Pooling"), "pooling by nothing"),
        ({**MEAN, "include_prompt": False}, ("Transformer", "Pooling"), "include_prompt"),
        (LAST, ("Transformer", "Pooling", "Dense"), "the step Dense is not supported"),
        (LAST, ("Transformer",), "no Pooling step"),
    ],
)  # fmt: skip
def test_other_poolings_are_refused_by_name(tmp_path, pooling, steps, said):
    with pytest.raises(CheckpointError, match=said):
        load(embedder(tmp_path / "m", pooling=pooling, steps=steps))


def test_what_else_a_folder_says_is_kept_to_or_told(tmp_path):
    folder = embedder(tmp_path / "m", pooling={"pooling_mode": "lasttoken"})
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 20, "do_lower_case": False}))
    prompts_file = {"prompts": {"query": "Instruct: ", "document": ""}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts_file))
    llm = load(folder, backend="eager")
    assert llm.model.context == 20
    with pytest.raises(PromptTooLong):
        llm.embed([[5] * 21])
    assert any("the prompts query are not put before" in note for note in llm.report.notes)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    with pytest.raises(CheckpointError, match="do_lower_case"):
        load(folder)
    (folder / "modules.json").write_text(json.dumps([{"type": "Pooling", "path": "../.."}]))
    with pytest.raises(CheckpointError, match="leads out"):
        load(folder)
