"""What a rank reads of a checkpoint, and what it holds: its part, and little beside it."""

from __future__ import annotations

import pytest
import torch

from graft.engine.setup.stages import capture, settings_for, target_of, transform
from graft.models.load import load_model
from graft.passes.config import load_config, shard_sets, with_sets
from graft.passes.library.shard.weights import Shards, take
from marks import short
from processes import run_python

FAMILIES = ("llama", "gpt2", "qwen3-moe", "gpt-oss", "olmo-2", "cohere", "deepseek-v2", "phi-3", "gemma-3", "bitnet")
WHOLE = {"gpt2": 256 * 32 * 4, "deepseek-v2": 9 * 1024}  # positions; projections into latent vectors


def saved(folder, family):
    load_model(f"tiny-{family}", dtype="float32", device="cpu").module.save_pretrained(folder, max_shard_size="20KB")
    return folder


def part_of(folder, rank, world, ranks, quantize=None):
    """The graph of a rank; ranks: as many does the loader know of."""
    model = load_model(folder, dtype="float32", device="cpu", ranks=ranks)
    settings = with_sets(settings_for(model, None, quantize), shard_sets(rank, world))
    made = transform(model, capture(model), settings, target_of(model, settings, "eager"), keep_weights=False)
    return model, made


def names_of(made):
    return {name: parameter.detach() for name, parameter in made.graph_module.named_parameters()}


def whole_and_cut(self, name, tensor, axis, ranges):
    """The wrong variant: all of a weight is read for its part."""
    assert self.lazy is not None
    self.lazy.fill(tensor)
    return take(tensor, axis, ranges)


@pytest.mark.parametrize("family", short(FAMILIES, "llama"))
def test_a_rank_reads_its_part_and_no_more(tmp_path, family):
    """And its graph is that of one that has read everything, bit for bit."""
    folder = saved(tmp_path, family)
    _, expected = part_of(folder, 1, 2, ranks=1)
    model, made = part_of(folder, 1, 2, ranks=2)
    one, other = names_of(expected), names_of(made)
    assert list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)
    size = sum(file.path.stat().st_size for file in model.lazy.files)
    allowed = 1.05 * size / 2 + WHOLE.get(family, 0)
    assert size / 2 * 0.9 < model.lazy.taken <= allowed
    assert any("in files were read here" in note for note in made.report.notes)
    held = sum(p.untyped_storage().nbytes() for p in {**one}.values())
    assert held <= 1.05 * allowed


def test_one_that_reads_all_of_a_weight_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(Shards, "lazy_part", whole_and_cut)
    model, _ = part_of(saved(tmp_path, "llama"), 0, 2, ranks=2)
    assert model.lazy.taken > 1.5 * sum(file.path.stat().st_size for file in model.lazy.files) / 2


def bare(shape, dtype, device):
    """As on a GPU, where no pages can be promised: a storage of no bytes."""
    made = torch.empty(tuple(shape), dtype=dtype, device=device)
    made.untyped_storage().resize_(0)
    return made


def test_capture_and_transforms_need_no_memory(tmp_path, monkeypatch):
    folder = saved(tmp_path, "llama")
    _, expected = part_of(folder, 0, 2, ranks=1)
    for home in ("graft.models.sliced", "graft.weights.lazy"):
        monkeypatch.setattr(f"{home}.hollow", bare)
    model, made = part_of(folder, 0, 2, ranks=2)
    one, other = names_of(expected), names_of(made)
    assert list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)
    assert model.lazy.taken <= 1.05 * sum(file.path.stat().st_size for file in model.lazy.files) / 2


def test_quantized_weights_are_made_of_the_part(tmp_path):
    folder = saved(tmp_path, "llama")
    _, expected = part_of(folder, 0, 2, ranks=1, quantize="int8")
    model, made = part_of(folder, 0, 2, ranks=2, quantize="int8")
    one, other = names_of(expected), names_of(made)
    assert list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)
    assert model.lazy.taken <= 1.05 * sum(file.path.stat().st_size for file in model.lazy.files) / 2


@pytest.mark.exhaustive
def test_numeric_checks_have_the_numbers(tmp_path):
    model = load_model(saved(tmp_path, "llama"), dtype="float32", device="cpu", ranks=2)
    others = {name: {"enabled": False} for name in load_config().transforms if name.startswith(("fuse_", "merge_"))}
    settings = with_sets(settings_for(model, {"verify": "matches", "transforms": others}), shard_sets(0, 2))
    made = transform(model, capture(model), settings, target_of(model, settings, "eager"), keep_weights=False)
    checks = [match.numeric_check for match in made.report.transforms["shard_tensor_parallel"].matches]
    assert len(checks) == 6 and all(check is not None and check.share < 1 for check in checks)
    assert any(
        "were read whole, because verify: matches computes with them" in note
        for note in made.notes + made.report.notes
    )


MEMORY = """
import re, sys, torch
from pathlib import Path
from graft.engine.setup.stages import capture, settings_for, target_of, transform
from graft.models.load import load_model
from graft.passes.config import shard_sets, with_sets

def held(name):
    return int(re.search(rf"{name}:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def load(folder, ranks):
    model = load_model(folder, dtype="bfloat16", device="cpu", ranks=ranks)
    settings = with_sets(settings_for(model, None), shard_sets(0, 2))
    return model, transform(model, capture(model), settings, target_of(model, settings, "eager"), keep_weights=False)

small, large, ranks = sys.argv[1], sys.argv[2], int(sys.argv[3])
load(small, ranks)  # what capture and transforms take
before = held("RssAnon") + held("RssShmem")
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
file = held("RssFile")
model, made = load(large, ranks)
print(held("VmHWM") - file - before, held("RssAnon") + held("RssShmem") - before)
"""


def large_model(folder, vocabulary):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=1024, intermediate_size=4096, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=256,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="64MB")
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@pytest.mark.exhaustive
def test_the_memory_of_a_rank_is_that_of_its_part(tmp_path):
    """Peak and rest, by the system's count; one that loads everything needs twice as much on the way."""
    large_model(tmp_path / "small", 256)
    size = large_model(tmp_path / "large", 65_536)
    found = {}
    for ranks in (2, 1):
        done = run_python("-c", MEMORY, str(tmp_path / "small"), str(tmp_path / "large"), str(ranks))
        assert done.returncode == 0, done.stderr
        found[ranks] = [int(number) for number in done.stdout.split()[-2:]]
    assert max(found[2]) <= 1.05 * size / 2, (found, size)
    assert found[1][0] > 0.9 * size, (found, size)
