"""Headers of safetensors files, damaged in any way, are one line of CheckpointError; what passes can be read."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from conftest import tiny
from graft.base.errors import CheckpointError
from graft.models.load import load_model
from graft.weights.checkpoint import check_safetensors
from marks import examples


def write(path: Path, header, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(start: int, stop: int, dtype: str = "U8", shape: list[int] | None = None) -> dict:
    return {"dtype": dtype, "shape": [stop - start] if shape is None else shape, "data_offsets": [start, stop]}


@pytest.fixture
def folder(tmp_path):
    tiny("llama").module.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("header", "told"),
    [
        ([], "its header is a list"),
        (3, "its header is a int"),
        (b"[" * 100_000, "not a safetensors file"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not a safetensors file"),
        ({"a": 1}, "the header says 1 of a"),
        ({"a": {}}, "the header says {} of a"),
        ({"a": None}, "the header says None of a"),
        ({"a": {**entry(0, 8), "data_offsets": ["0", "8"]}}, "not its dtype, shape and data_offsets"),
        ({"a": {**entry(0, 8), "data_offsets": [0, 8.0]}}, "not its dtype, shape and data_offsets"),
        ({"a": {**entry(0, 8), "data_offsets": [0]}}, "not its dtype, shape and data_offsets"),
        ({"a": {**entry(0, 8), "data_offsets": [True, 8]}}, "not its dtype, shape and data_offsets"),
        ({"a": {**entry(0, 8), "shape": [-8]}}, "not its dtype, shape and data_offsets"),
        ({"a": entry(0, 8, "F31")}, "unknown dtype 'F31'"),
        ({"a": entry(0, 8, shape=[3])}, r"takes 3 bytes, but has 8"),
        ({"a": entry(8, 0, shape=[0])}, r"takes 0 bytes, but has -8"),
        ({"a": entry(0, 5), "b": entry(4, 8)}, "a and b overlap at byte 4"),
        ({"a": entry(0, 3), "b": entry(4, 8)}, "a and b have a hole between them"),
        ({"a": entry(0, 8), "b": entry(8, 16)}, "8 bytes of tensors instead of 16"),
        ({"a": entry(0, 4)}, "8 bytes of tensors instead of 4"),
        ({"a": entry(0, 8), "__metadata__": {"format": 1}}, "__metadata__ does not map words"),
        ({"a": entry(0, 8), "__metadata__": []}, "__metadata__ does not map words"),
    ],
)
def test_each_damage_is_named(folder, header, told):
    write(folder / "model.safetensors", header, bytes(8))
    with pytest.raises(CheckpointError, match=told) as error:
        load_model(folder, device="cpu")
    assert "\n" not in str(error.value) and "model.safetensors" in str(error.value)


def test_a_dangling_link_a_folder_and_a_file_without_permission(folder, monkeypatch):
    weights = folder / "model.safetensors"
    weights.rename(folder / "away")
    weights.symlink_to(folder / "nowhere")
    with pytest.raises(CheckpointError, match=r"is a link to .*nowhere, which is not there"):
        load_model(folder, device="cpu")
    weights.unlink()
    weights.mkdir()
    with pytest.raises(CheckpointError, match="is a folder, not a file"):
        load_model(folder, device="cpu")
    weights.rmdir()
    (folder / "away").rename(weights)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # the tests may run as root, who may read everything
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
        check_safetensors(weights)


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "{", '"x"'])
def test_a_damaged_index_is_named(folder, text):
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json (is damaged|holds a)"):
        load_model(folder, device="cpu")


@pytest.mark.parametrize(
    "text", ["[]", "3", "{", '{"model_type": []}', '{"model_type": "llama", "hidden_size": "x"}', "{}"]
)
def test_a_damaged_config_is_one_line(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError) as error:
        load_model(folder, device="cpu")
    assert "\n" not in str(error.value)


NUMBERS = st.integers(-1, 24) | st.sampled_from(["0", 1.5, None, True, 2**70])
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["U8", "F32", "BF16", "F4", "nonsense", 3]),
        "shape": st.lists(NUMBERS, max_size=3) | st.just(2),
        "data_offsets": st.lists(NUMBERS, max_size=3) | st.tuples(st.just(0), st.integers(0, 24)),
    },
)
SOUND = st.integers(0, 24).map(lambda size: entry(0, size))
HEADERS = st.recursive(NUMBERS, lambda inner: st.lists(inner, max_size=2), max_leaves=3) | st.dictionaries(
    st.sampled_from(["a", "b", "__metadata__"]), ENTRIES | SOUND | NUMBERS | st.just([]), max_size=3
)


@settings(max_examples=examples(150), deadline=None)
@given(header=HEADERS, size=st.integers(0, 24))
@example({"a": entry(0, 4, "F32", [1]), "b": entry(4, 8, "F4", [2, 4])}, 8)
def test_what_passes_is_what_safetensors_opens(tmp_path_factory, header, size):
    path = write(tmp_path_factory.getbasetemp() / "header.safetensors", header, bytes(size))
    try:
        check_safetensors(path)
    except CheckpointError as error:
        assert "\n" not in str(error)
        return
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(header) - {"__metadata__"}


@settings(max_examples=examples(40), deadline=None)
@given(
    flips=st.lists(st.tuples(st.integers(0, 600), st.integers(1, 255)), min_size=1, max_size=4),
    cut=st.none() | st.integers(0, 600),
)
def test_random_damage_to_a_real_file_never_escapes_as_a_foreign_error(tmp_path_factory, flips, cut):
    folder = tmp_path_factory.mktemp("damaged")
    tiny("llama").module.save_pretrained(folder)
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    for place, change in flips:
        content[place] ^= change
    weights.write_bytes(bytes(content[:cut]))
    try:
        loaded = load_model(folder, device="cpu").module
    except CheckpointError as error:
        assert "\n" not in str(error)
        return
    assert {name: p.shape for name, p in loaded.named_parameters()} == {
        name: p.shape for name, p in tiny("llama").module.named_parameters()
    }


def test_sound_files_pass(tmp_path):
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64, torch.complex64):
        tensors = {
            "a": torch.zeros(3, 5, dtype=dtype),
            "none": torch.zeros(0, 4, dtype=dtype),
            "one": torch.zeros((), dtype=dtype),
        }
        save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
        check_safetensors(tmp_path / "x.safetensors")
    save_file({}, tmp_path / "x.safetensors")
    check_safetensors(tmp_path / "x.safetensors")
