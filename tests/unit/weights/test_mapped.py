"""Weights in one mapped file: as they were, aligned, without memory of their own, and refused when damaged."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from graft.base.errors import ArtifactError
from graft.weights import mapped
from graft.weights.mapped import map_tensors, stream_tensors, write_mapped

TENSORS = {
    "a": torch.arange(35, dtype=torch.float32).view(5, 7),
    "b.weight:q8": torch.arange(100, dtype=torch.uint8),
    "scale": torch.empty((4, 0), dtype=torch.float16),
    "half": torch.arange(9).to(torch.bfloat16),
    "eight": torch.arange(6).to(torch.float8_e4m3fn),
    "one": torch.tensor(3, dtype=torch.int64),
    "turned": torch.arange(6.0).view(2, 3).t(),
}


@pytest.fixture
def file(tmp_path):
    write_mapped(tmp_path / "w.safetensors", TENSORS)
    return tmp_path / "w.safetensors"


def read(file, how=map_tensors, *more):
    with file.open("rb") as opened:
        return how(file, opened.fileno(), *more)


def same(left, right):
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left.float(), right.float())


@pytest.mark.parametrize("how", ["mapped", "streamed"])
def test_every_tensor_comes_back(file, how, monkeypatch):
    monkeypatch.setattr(mapped, "CHUNK", 48)  # a tensor in several pieces
    found = read(file) if how == "mapped" else read(file, stream_tensors, torch.device("cpu"))
    assert found.keys() == TENSORS.keys()
    assert all(same(found[name], tensor) for name, tensor in TENSORS.items())


def test_tensors_begin_where_torch_would_put_them(file):
    assert all(tensor.data_ptr() % 64 == 0 for tensor in read(file).values() if tensor.numel())


def test_it_is_a_file_of_safetensors(file):
    found = load_file(file)
    assert all(same(found[name], tensor) for name, tensor in TENSORS.items())


def test_writing_to_a_tensor_leaves_the_file(file):
    before = file.read_bytes()
    read(file)["a"].fill_(7)
    assert file.read_bytes() == before


def test_mapped_weights_take_no_memory_of_their_own(tmp_path):
    """All are read; the pages are the file's. A copy of them is seen by the same number."""
    size = 64 << 20
    write_mapped(tmp_path / "w", {"w": torch.ones(size // 4)})

    def own() -> int:
        lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
        return int(lines["RssAnon"].split()[0]) * 1024

    before = own()
    found = read(tmp_path / "w")["w"]
    assert found.sum() == size // 4
    assert own() - before < size // 10
    kept = found.clone()
    assert own() - before > size // 2 and len(kept) == len(found)


def header(file, change):
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    entries = json.loads(content[8 : 8 + length])
    change(entries)
    made = json.dumps(entries).encode()
    file.write_bytes(struct.pack("<Q", len(made)) + made + content[8 + length :])


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda file: os.truncate(file, 4), "damaged"),
        (lambda file: os.truncate(file, 100), "damaged"),
        (lambda file: file.write_bytes(struct.pack("<Q", 1 << 60) + b"{}"), "header of 1152921504606846976 bytes"),
        (lambda file: file.write_bytes(struct.pack("<Q", 4) + b"nope"), "cannot be read"),
        (lambda file: header(file, lambda e: e["a"].update(data_offsets=[0, 1 << 40])), "a lies at"),
        (lambda file: header(file, lambda e: e["a"].update(data_offsets=[-64, 76])), "a lies at"),
        (lambda file: header(file, lambda e: e["a"].update(shape=[5, 8])), "a lies at"),
        (lambda file: header(file, lambda e: e["a"].update(dtype="Q9")), "cannot be read"),
    ],
)
def test_damage_is_refused_before_anything_is_mapped(file, damage, told):
    damage(file)
    with pytest.raises(ArtifactError, match=told):
        read(file)


def test_a_file_that_ends_while_it_is_streamed_is_told(file, monkeypatch):
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(ArtifactError, match="ended at byte"):
        read(file, stream_tensors, torch.device("cpu"))


def test_a_dtype_that_the_format_has_not_is_refused(tmp_path):
    with pytest.raises(ArtifactError, match="complex64"):
        write_mapped(tmp_path / "w", {"w": torch.ones(2, dtype=torch.complex64)})
