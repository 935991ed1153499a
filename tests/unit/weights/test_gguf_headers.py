"""GGUF files of other architectures, with gaps in their metadata, or damaged anyhow: one line of CheckpointError."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.base.errors import CheckpointError
from graft.models.load import load_model
from graft.weights.gguf.header import StringArray, read_gguf_header
from marks import examples

WIDTH, HIDDEN, VOCAB = 32, 64, 40
TOKENIZER = "tokenizer.ggml."


def write(path: Path, architecture: str = "llama", change=lambda writer: None, extra=()) -> Path:
    """A one-layer Llama; `change` edits the writer's metadata, `extra` are tensors more."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // 4)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "</s>", "h", "e", "l", "o", "he", "ll", *(f"x{i}" for i in range(VOCAB - 8))])
    writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (VOCAB - 2))
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    shapes = {
        "token_embd": (VOCAB, WIDTH), "output_norm": (WIDTH,), "blk.0.attn_norm": (WIDTH,),
        "blk.0.ffn_norm": (WIDTH,),
        "blk.0.attn_q": (WIDTH, WIDTH), "blk.0.attn_k": (WIDTH // 2, WIDTH), "blk.0.attn_v": (WIDTH // 2, WIDTH),
        "blk.0.attn_output": (WIDTH, WIDTH), "blk.0.ffn_gate": (HIDDEN, WIDTH), "blk.0.ffn_up": (HIDDEN, WIDTH),
        "blk.0.ffn_down": (WIDTH, HIDDEN), **dict(extra),
    }  # fmt: skip
    for name, shape in shapes.items():
        values = rng.standard_normal(shape).astype(np.float32)
        if "ffn_" in name and len(shape) == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name if "." in name[-5:] else f"{name}.weight", values)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAFT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def without(*keys: str):
    def change(writer):
        for key in keys:
            del writer.kv_data[0][key]

    return change


def setting(**values):
    """Replaces values of the metadata, types kept; dots are two underscores."""

    def change(writer):
        for key, value in values.items():
            name = key.replace("__", ".")
            writer.kv_data[0][name].value = value

    return change


def refused(path: Path, told: str) -> None:
    for in_blocks in (False, True):
        with pytest.raises(CheckpointError, match=told) as error:
            load_model(path, device="cpu", in_blocks=in_blocks)
        assert "\n" not in str(error.value)
    assert not list((path.parent / "cache").rglob("*.partial"))


def test_the_file_itself_loads_both_ways(cache):
    path = write(cache / "sound.gguf")
    for in_blocks in (False, True):
        assert load_model(path, device="cpu", in_blocks=in_blocks).layers == 1


@pytest.mark.parametrize(
    "architecture", ["gemma", "bert", "deepseek2", "gpt-oss", "t5", "lfm2", "nonsense", "tokenizer", "general"]
)
def test_architectures_that_transformers_makes_no_decoder_of(cache, architecture):
    refused(write(cache / "a.gguf", architecture), rf"architecture '{architecture}' is not supported.*Known: .*llama")


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3", "phi3", "qwen2", "qwen3", "mistral", "mamba", "qwen35"])
def test_metadata_of_another_architecture_is_one_line(cache, architecture):
    refused(write(cache / "a.gguf", architecture), "gguf|GGUF")


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (["general.architecture"], "does not say its general.architecture"),
        (["llama.block_count"], "llama.block_count is None"),
        (["llama.attention.head_count"], "cannot be read|metadata make it"),
        ([TOKENIZER + "model"], "has no tokenizer.ggml.model"),
        ([TOKENIZER + "tokens"], "has no tokenizer.ggml.tokens"),
        ([TOKENIZER + "merges"], "has no tokenizer.ggml.merges, which a gpt2 tokenizer needs"),
        ([TOKENIZER + name for name in ("model", "tokens", "merges", "token_type")], "has no tokenizer.ggml.model"),
    ],
)
def test_missing_metadata_are_named(cache, keys, told):
    refused(write(cache / "a.gguf", change=without(*keys)), told)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"llama__block_count": 1 << 24}, "block_count is 16777216, but the file has the tensors of 1 layers"),
        ({"llama__block_count": 0}, "block_count is 0"),
        ({"llama__feed_forward_length": 1 << 20}, r"is \[\d+, \d+\], but the file's metadata make it \[\d+, \d+\]"),
        ({"llama__embedding_length": 64}, "but the file's metadata make it"),
        ({"llama__vocab_size": 1 << 30}, "but the file's metadata make it"),
        ({"llama__attention__head_count": 0}, "ZeroDivisionError"),
        ({"tokenizer__ggml__bos_token_id": 40}, "bos_token_id is 40, but the file has 40 tokens"),
        ({"tokenizer__ggml__token_type": [1, 2]}, "token_type is not one number for each of the 40 tokens"),
        ({"tokenizer__ggml__model": "llama", "tokenizer__ggml__merges": ["he"]}, r"a\.gguf"),
        ({"tokenizer__ggml__merges": ["he"]}, "cannot be read"),
        ({"tokenizer__ggml__merges": ["no such"]}, "cannot be read"),
    ],
)
def test_metadata_that_contradict_the_file_are_named(cache, values, told):
    refused(write(cache / "a.gguf", change=setting(**values)), told)


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "rope_freqs", "blk.0.nonsense"])
def test_tensors_that_the_model_has_no_place_for_are_refused(cache, name):
    """rope_freqs carries the scaled frequencies of Llama 3, which transformers leaves out: other logits."""
    refused(write(cache / "a.gguf", extra={name: (WIDTH,)}.items()), rf"holds {name}.*1 tensors would be dropped")


def test_damage_that_the_gguf_package_would_loop_over(cache):
    """Counts are the largest of their type: each was hours, or all memory."""
    whole = write(cache / "a.gguf").read_bytes()
    huge = struct.pack("<Q", 2**64 - 1)
    key = struct.pack("<Q", 21) + b"tokenizer.ggml.tokens" + struct.pack("<I", 9) + struct.pack("<I", 8)
    for place in (8, 16, 24, whole.index(key) + len(key), whole.index(key) + len(key) + 8):
        (cache / "a.gguf").write_bytes(whole[:place] + huge + whole[place + 8 :])
        refused(cache / "a.gguf", "truncated or damaged")


def test_other_versions_and_byte_orders_are_named(cache):
    whole = write(cache / "a.gguf").read_bytes()
    for version, told in (
        (1, "has version 1"),
        (9, "has version 9"),
        (3 << 24, "is big-endian"),
        (0, "has version 0"),
    ):
        (cache / "a.gguf").write_bytes(whole[:4] + struct.pack("<I", version) + whole[8:])
        refused(cache / "a.gguf", told)


def test_the_header_is_what_the_gguf_package_reads(tmp_path):
    path = write(tmp_path / "a.gguf")
    header, reader = read_gguf_header(path), gguf.GGUFReader(path)
    stored = {tensor.name: tensor for tensor in header.tensors}
    for tensor in reader.tensors:
        ours = stored.pop(tensor.name)
        assert ours.shape == tuple(reversed(tensor.shape.tolist())) and ours.kind == tensor.tensor_type
        assert header.start + ours.offset == tensor.data_offset and ours.size == tensor.n_bytes
    assert not stored and header.end == max(t.data_offset + t.n_bytes for t in reader.tensors)
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert set(fields) == set(header.metadata)
    for key, value in header.metadata.items():
        found = fields[key].contents()
        assert value == found if not isinstance(value, (StringArray, tuple)) else True
        if isinstance(value, StringArray):
            assert value.count == len(found)
        elif isinstance(value, tuple):
            assert list(value) == found


DAMAGE = st.one_of(
    st.tuples(st.just("flip"), st.floats(0, 1), st.integers(1, 255)),
    st.tuples(st.just("long"), st.floats(0, 1), st.sampled_from([0, 1, 2, 8, 255, 2**31, 2**40, 2**64 - 1])),
    st.tuples(st.just("cut"), st.floats(0, 1), st.integers(0, 9)),
)


def damaged(content: bytes, end: int, damages) -> bytes:
    """Places are parts of the header, which ends at `end`."""
    data = bytearray(content)
    for kind, part, value in damages:
        place = int(part * (min(end, len(data)) - 8))
        if kind == "flip" and place < len(data):
            data[place] ^= value
        elif kind == "long":
            data[place : place + 8] = struct.pack("<Q", value)
        elif kind == "cut":
            del data[place : place + value]
    return bytes(data)


@settings(max_examples=examples(60), deadline=None)
@given(damages=st.lists(DAMAGE, min_size=1, max_size=3), in_blocks=st.booleans())
def test_random_damage_never_escapes_as_a_foreign_error(tmp_path_factory, damages, in_blocks):
    folder = tmp_path_factory.mktemp("damaged")
    path = write(folder / "a.gguf")
    path.write_bytes(damaged(path.read_bytes(), read_gguf_header(path).start, damages))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAFT_CACHE_DIR", str(folder / "cache"))
        try:
            assert load_model(path, device="cpu", in_blocks=in_blocks).layers == 1
        except CheckpointError as error:
            assert "\n" not in str(error)
    assert not list((folder / "cache").rglob("*.partial"))


@settings(max_examples=examples(150), deadline=None)
@given(damages=st.lists(DAMAGE, min_size=1, max_size=3))
def test_the_header_alone_is_read_or_refused(tmp_path_factory, damages):
    folder = tmp_path_factory.getbasetemp()
    path = folder / "header.gguf"
    if not (folder / "whole.gguf").exists():
        write(folder / "whole.gguf")
    whole = folder / "whole.gguf"
    path.write_bytes(damaged(whole.read_bytes(), read_gguf_header(whole).start, damages))
    try:
        header = read_gguf_header(path)
    except CheckpointError as error:
        assert "\n" not in str(error)
        return
    assert header.end <= path.stat().st_size
    assert len(gguf.GGUFReader(path).tensors) == len(header.tensors)
