"""Parts of tensors out of safetensors files: the numbers of the whole, and no byte beside them."""

from __future__ import annotations

import random
import re
from math import prod
from pathlib import Path

import pytest
import torch

from graft.base.errors import CheckpointError
from graft.weights.mapped import DTYPES, write_mapped
from graft.weights.recorded import RecordedTensor, recorded_tensors
from graft.weights.sources import WeightFile, runs, whole_box

SHAPE = (3, 4, 5)


def numbers(shape, dtype=torch.float32, seed=0):
    made = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed))
    return made.to(dtype)


def boxes(shape, count, seed=0):
    """Some, with whole axes among them."""
    draw = random.Random(seed)
    yield whole_box(shape)
    for _ in range(count):
        pairs = [sorted(draw.sample(range(size + 1), 2)) for size in shape]
        yield tuple(
            (0, size) if draw.random() < 0.3 else tuple(pair) for pair, size in zip(pairs, shape, strict=True)
        )


def taken(tensor, box):
    return tensor[tuple(slice(*pair) for pair in box)]


def stored(tmp_path, tensors):
    write_mapped(tmp_path / "model.safetensors", tensors)
    file = WeightFile.open(tmp_path / "model.safetensors")
    return file, recorded_tensors([file])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_box_has_the_numbers_of_the_whole_and_reads_only_its_own(tmp_path, dtype):
    whole = numbers(SHAPE, dtype)
    file, found = stored(tmp_path, {"other": numbers((7,)), "w": whole})
    for box in boxes(SHAPE, 12):
        before, out = file.taken, torch.empty([last - first for first, last in box], dtype=dtype)
        found["w"].source.read(box, out)
        assert torch.equal(out.view(torch.uint8), taken(whole, box).contiguous().view(torch.uint8))
        assert file.taken - before == out.nbytes
        starts, size = runs(SHAPE, box)
        assert len(starts) * size == out.numel()


def test_another_dtype_and_steps_of_a_large_one(tmp_path, monkeypatch):
    whole = numbers((64, 6), torch.bfloat16)
    _, found = stored(tmp_path, {"w": whole})
    monkeypatch.setattr("graft.weights.sources.CHUNK", 100)
    out = torch.empty(5, 60).t()
    found["w"].source.read(((2, 62), (1, 6)), out)
    assert torch.equal(out, whole[2:62, 1:6].float())


COMPOSED = {
    "joined": lambda w: torch.cat([w["a"], w["b"]], dim=1),
    "stacked": lambda w: torch.stack([w["a"], w["a"], w["b"]]),
    "stacked inside": lambda w: torch.stack([w["a"], w["b"]], dim=1),
    "transposed": lambda w: w["a"].t(),
    "experts": lambda w: torch.cat([torch.stack([w["a"], w["b"]]), torch.stack([w["b"], w["a"]])], dim=1),
    "experts transposed": lambda w: torch.stack([w["a"], w["b"]]).transpose(-1, -2).contiguous(),
    "cut": lambda w: w["a"][2:7, 1:],
    "chunks": lambda w: torch.cat([*reversed(w["a"].chunk(3))], dim=0),
    "split": lambda w: w["a"].split([2, 7])[1],
    "converted": lambda w: torch.cat([w["a"], w["b"]]).to(torch.bfloat16),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_what_loaders_do_is_remembered(tmp_path, name):
    real = {"a": numbers((9, 6), seed=1), "b": numbers((9, 6), seed=2)}
    file, found = stored(tmp_path, real)
    expected, made = COMPOSED[name](real), COMPOSED[name](found)
    assert isinstance(made, RecordedTensor) and file.taken == 0
    assert made.shape == expected.shape and made.dtype == expected.dtype
    for box in boxes(tuple(expected.shape), 12):
        out = torch.empty([last - first for first, last in box], dtype=expected.dtype)
        made.source.read(box, out)
        assert torch.equal(out, taken(expected, box))


@pytest.mark.parametrize(
    "compute",
    [
        lambda w: w["a"] * 2,
        lambda w: w["a"][::2],
        lambda w: w["a"].reshape(6, 9),
        lambda w: torch.cat([w["a"], numbers((1, 6))]),
    ],
)
def test_what_has_no_rule_is_computed(tmp_path, compute):
    real = {"a": numbers((9, 6))}
    file, found = stored(tmp_path, real)
    made = compute(found)
    assert type(made) is torch.Tensor and torch.equal(made, compute(real)) and file.taken == real["a"].nbytes


def read_by_system():
    """Bytes that this process has read, by the system's own count."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


@pytest.mark.parametrize(("axis", "wrong"), [(0, False), (1, False), (1, True)])
def test_the_system_counts_no_more_bytes_than_the_part_has(tmp_path, axis, wrong):
    """Half of a weight of 4 MiB. The wrong variant reads all of it and cuts."""
    whole = numbers((1024, 1024))
    _, found = stored(tmp_path, {"w": whole})
    box = tuple((512, 1024) if at == axis else (0, 1024) for at in range(2))
    before = read_by_system()
    if wrong:
        out = taken(found["w"].numbers(), box).clone()
    else:
        out = torch.empty([last - first for first, last in box])
        found["w"].source.read(box, out)
    read = read_by_system() - before
    assert torch.equal(out, taken(whole, box))
    assert (read <= 1.05 * prod(out.shape) * 4) is not wrong


def test_a_file_that_ends_early_is_told(tmp_path):
    file, found = stored(tmp_path, {"w": numbers((64, 64))})
    whole = file.path.read_bytes()
    file.path.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=r"ended at byte \d+ while it was read; copy it again"):
        found["w"].numbers()
