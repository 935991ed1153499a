"""Weights that stay in their checkpoint: found by their bytes, read as they are, and checked."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

import graft
from conftest import tiny
from graft.base.errors import ArtifactError
from graft.weights.references import find_references, read_references

PARAMS = graft.SamplingParams(max_tokens=5, ignore_eos=True, logprobs=1)
SMALL = {"kv_cache_memory": "8MiB"}
Q, K, V = (torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows)) for rows in (8, 4, 5))


@pytest.fixture
def checkpoint(tmp_path):
    save_file({"q": Q, "k": K, "odd": torch.ones(3, dtype=torch.uint8)}, tmp_path / "a.safetensors")
    save_file({"v": V, "scale": torch.tensor(2.0), "none": torch.empty(0, 8)}, tmp_path / "b.safetensors")
    (tmp_path / "damaged.safetensors").write_bytes(b"\1\0\0\0\0\0\0\0{")
    return tmp_path


def read_back(checkpoint, found, device="cpu"):
    data = json.loads(json.dumps({name: one.to_data() for name, one in found.items()}))
    names = {file for _, _, pieces in data.values() for file, *_ in pieces}
    descriptors = {name: os.open(checkpoint / name, os.O_RDONLY) for name in names}
    try:
        return read_references(data, checkpoint, descriptors, torch.device(device))
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def test_whole_and_merged_weights_are_found_and_read(checkpoint):
    weights = {"qkv": torch.cat([Q, K, V]), "vq": torch.cat([V, Q]), "v": V, "twice": torch.cat([K, K])}
    found = find_references(checkpoint, weights | {"scale": torch.tensor(2.0)})
    assert [len(found[name].pieces) for name in ("qkv", "vq", "v", "twice", "scale")] == [3, 2, 1, 2, 1]
    read = read_back(checkpoint, found)
    assert all(torch.equal(read[name], tensor) for name, tensor in weights.items()) and read["scale"] == 2


@pytest.mark.parametrize(
    "tensor",
    [
        torch.cat([Q, K, V])[:-1],
        torch.cat([Q, K + 1e-6]),
        torch.cat([Q, K])[1:],
        Q.to(torch.bfloat16),
        Q.t(),
        Q.reshape(4, 16),
        torch.empty(0, 8),
        torch.zeros(4, 8),
        Q.to(torch.complex64),
    ],
    ids=["cut", "changed", "from the second row", "dtype", "strides", "shape", "empty", "absent", "unknown dtype"],
)
def test_what_is_not_there_byte_for_byte_is_packed(checkpoint, tensor):
    assert find_references(checkpoint, {"w": tensor}) == {}


def test_a_folder_without_safetensors_holds_none(tmp_path):
    assert find_references(tmp_path, {"w": Q}) == {}


# ── parts of ranks ──────────────────────────────────────────────────────────────────────────────────────────────


def test_parts_of_ranks_are_found_and_read(checkpoint):
    """Rows, rows of several tensors, columns of each row, and experts that were joined."""
    parts = {
        "rows": Q[4:], "merged": torch.cat([Q[:4], K[:2], V[1:3]]), "columns": Q[:, 4:].clone(), "whole": K,
        "stacked": torch.stack([Q[2:4], K[:2]]), "columns of two": torch.cat([Q[:, :4], K[:, :4]]),
    }  # fmt: skip
    found = find_references(checkpoint, parts, ranks=2)
    assert {name: len(one.pieces) for name, one in found.items()} == {
        "rows": 1, "merged": 3, "columns": 1, "whole": 1, "stacked": 2, "columns of two": 2,
    }  # fmt: skip
    read = read_back(checkpoint, found)
    assert all(torch.equal(read[name], tensor) for name, tensor in parts.items())
    assert not find_references(checkpoint, parts).keys() - {"whole"}, "one rank takes whole tensors"


@pytest.mark.parametrize(
    "tensor",
    [
        torch.cat([Q[:4], K[:2] + 1e-6]),
        Q[:, 2:6].clone(),
        torch.cat([Q[:, 4:], torch.zeros(1, 4)]),
        Q[:, 4:],
        torch.zeros(4, 8),
    ],
    ids=["changed", "other columns", "one row more", "strides", "absent"],
)
def test_parts_that_are_not_there_byte_for_byte_are_packed(checkpoint, tensor):
    assert find_references(checkpoint, {"w": tensor}, ranks=2) == {}


def test_a_part_beyond_the_file_is_refused(checkpoint):
    found = find_references(checkpoint, {"w": Q[:, 4:].clone()}, ranks=2)
    beyond = replace(found["w"], pieces=(replace(found["w"].pieces[0], count=10**6),))
    with pytest.raises(ArtifactError, match="is shorter than what is to be read"):
        read_back(checkpoint, {"w": beyond})


# ── engines ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    tiny("llama").module.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llm(model):
    return graft.LLM(model, backend="eager", device="cpu", use_cache=False, **SMALL)


@pytest.fixture(scope="module")
def engine(llm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine") / "tiny"
    llm.save(folder)
    return folder


def answers(llm):
    return [(output.token_ids, output.logprobs) for output in llm.generate([[3, 1, 4], [1, 5, 9, 2]], PARAMS)]


def manifest(engine):
    return json.loads((engine / "manifest.json").read_text())


def test_an_engine_reads_the_checkpoints_own_weights(llm, model, engine, tmp_path):
    about = manifest(engine)["checkpoint"]
    assert about["folder"] == str(model) and list(about["files"]) == ["model.safetensors"]
    assert answers(graft.LLM(engine, **SMALL)) == answers(llm)
    llm.save(tmp_path / "packed", with_weights=True)
    assert manifest(tmp_path / "packed")["checkpoint"] is None
    sizes = [(folder / "weights.safetensors").stat().st_size for folder in (engine, tmp_path / "packed")]
    assert 2 * sizes[0] < sizes[1] and answers(graft.LLM(tmp_path / "packed", **SMALL)) == answers(llm)


def test_another_checkpoint_is_refused(model, engine, tmp_path):
    weights = model / "model.safetensors"
    before = weights.read_bytes()
    try:
        for content, why in (
            (before[:-1] + bytes([before[-1] ^ 1]), "was changed after it was saved"),
            (before[:-8], "is truncated"),
        ):
            weights.write_bytes(content)
            with pytest.raises(ArtifactError, match=why):
                graft.LLM(engine)
        weights.unlink()
        with pytest.raises(ArtifactError, match="cannot be opened"):
            graft.LLM(engine)
        shutil.move(model, tmp_path / "moved")
        with pytest.raises(ArtifactError, match="is the checkpoint whose weights are used, and is not there"):
            graft.LLM(engine)
        shutil.move(tmp_path / "moved", model)
    finally:
        weights.write_bytes(before)


def test_packed_weights_stay_in_the_folder(model, tmp_path):
    """Native kernels read other bytes than a checkpoint's."""
    graft.LLM(model, backend="native", device="cpu", use_cache=False, **SMALL).save(tmp_path / "engine")
    assert manifest(tmp_path / "engine")["checkpoint"] is None
