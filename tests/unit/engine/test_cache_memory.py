"""How large the key-value cache is, and what is said when memory does not suffice."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import graft
from conftest import tiny
from graft.base import device_memory as memory
from graft.base.device_memory import CacheSize, cache_size, container_memory, machine_memory, parse_size, size_text
from graft.base.errors import OutOfCache, OutOfMemory, UsageError
from graft.engine.kv.moves import Copy
from graft.engine.kv.tensors import LayerShape, allocate, bytes_per_block, copy_blocks, narrow_blocks
from graft.models.load import on_device

CPU = torch.device("cpu")
GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 * GIB),
        ("2 gb", 2 * GIB),
        ("0.5G", GIB // 2),
        ("512MiB", GIB // 2),
        (1234, 1234),
        ("7k", 7168),
        ("9B", 9),
    ],
)
def test_sizes_are_read(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "2 GiB more", "1e9", "2XB", True, "0", "0.0001B", "9" * 400 + "X"]
)
def test_sizes_that_mean_nothing_are_refused(text):
    with pytest.raises(UsageError, match="kv_cache_memory"):
        parse_size(text)


def test_sizes_are_told_in_readable_units():
    assert [size_text(n) for n in (5, 2048, 3 << 20, 5 * GIB // 2)] == ["5 bytes", "2.0 KiB", "3.0 MiB", "2.5 GiB"]


def test_the_size_follows_free_memory_with_a_margin(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: 6 * GIB)
    assert cache_size(1 << 20, 10**6, CPU).blocks == 3 << 10, "half of what is free"
    monkeypatch.setattr(memory, "free_memory", lambda device: 100 * GIB)
    assert cache_size(1 << 20, 10**6, CPU).blocks == 4 << 10, "at most 4 GiB on a CPU"
    cuda = cache_size(1 << 20, 10**6, torch.device("cuda"))
    assert cuda.blocks == 90 << 10 and "a margin of 10.0 GiB is kept" in cuda.reason
    few = cache_size(1 << 20, 10**6, torch.device("cuda"), addressable=1000)
    assert few.blocks == 1000 and "32 bits" in few.reason
    assert cache_size(1 << 20, 10**6, torch.device("cuda"), "50GiB", 1000).blocks == 50 << 10, "as asked for"
    assert cache_size(1 << 20, 10**6, torch.device("cuda"), addressable=10**6) == cuda
    assert cache_size(1 << 20, 7, CPU) == CacheSize(7, 7 << 20, "all that the engine can use at once")
    assert cache_size(1 << 20, 10**6, CPU, "1GiB").blocks == 1 << 10


def test_a_cache_of_its_own_accord_is_addressed_with_32_bits():
    layers = [LayerShape(8, 64, torch.bfloat16), LayerShape(8, 128, torch.float8_e4m3fn)]
    blocks = narrow_blocks(layers, 16)
    assert blocks is not None and (blocks + 1) * 17 * 8 * 128 < 1 << 31 <= (blocks + 3) * 17 * 8 * 128
    assert narrow_blocks([], 16) is None


def test_too_little_memory_is_told_with_the_numbers(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: GIB // 2)
    with pytest.raises(OutOfMemory, match=r"one block takes 1\.0 MiB, and 0 bytes may be used"):
        cache_size(1 << 20, 100, torch.device("cuda"))
    with pytest.raises(OutOfMemory, match=r"cache of 2\.0 GiB was asked for, but cpu has 512\.0 MiB free"):
        cache_size(1 << 20, 10**6, CPU, "2GiB")


def test_a_containers_limit_counts(tmp_path: Path):
    assert container_memory(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("300\n")
    assert container_memory(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert container_memory(tmp_path) == 700
    (tmp_path / "memory.stat").write_text("anon 250\ninactive_file 40\n")
    assert container_memory(tmp_path) == 740, "pages of files that were read are no loss"
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   5 kB\n")
    assert machine_memory(tmp_path / "meminfo") == 5 << 10
    assert machine_memory(tmp_path / "none") > 1 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_are_zero_and_take_memory_when_they_are_written(dtype):
    layers = [LayerShape(2, 8, dtype), LayerShape(1, 4, dtype)]
    tensors = allocate(layers, 10, 16, CPU)
    assert [tuple(t.shape) for t in tensors] == [(10, 16, 2, 8)] * 2 + [(10, 16, 1, 4)] * 2
    assert sum(t.nbytes for t in tensors) == 10 * bytes_per_block(layers, 16)
    assert all(t.dtype == dtype and not t.any() for t in tensors)
    (large, _) = allocate([LayerShape(8, 128, dtype)], 10_000, 16, CPU)
    assert large.nbytes > 300 << 20 and resident(large) < 50 << 20
    large[:5000] = 1
    assert resident(large) > 100 << 20


def resident(tensor):
    """Bytes of a tensor that are in memory, by the mappings it lies in: the rest of the process changes too."""
    first, last, found = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if mapping := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(number, 16) for number in mapping.groups())
            inside = begin < last and first < end
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1]) << 10
    return found


def test_blocks_are_copied_in_every_tensor():
    tensors = allocate([LayerShape(2, 8, torch.float32)], 6, 4, CPU)
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape))
    before = [t.clone() for t in tensors]
    copy_blocks(tensors, [Copy(1, 4), Copy(0, 5), Copy(1, 2)])
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor[[0, 1, 2, 3, 4, 5]], old[[0, 1, 1, 3, 1, 0]])


def test_a_request_that_can_never_fit_is_refused_and_the_others_go_on():
    llm = graft.LLM(tiny("llama"), kv_cache_memory=4 * 16 * 512)
    blocks = llm.engine.manager.blocks
    fits, never = [5, 6, 7], [5] * (16 * blocks)
    params = graft.SamplingParams(max_tokens=4, ignore_eos=True)
    good, bad = llm.generate([fits, never], params)
    assert len(good.token_ids) == 4 and bad.finish_reason == "error" and bad.token_ids == []
    assert isinstance(bad.error, OutOfCache) and f"has only {blocks}" in str(bad.error)
    with pytest.raises(OutOfCache, match="shorten it, lower max_tokens, or raise kv_cache_memory"):
        llm.generate([never], params)
    assert any("key-value cache" in note and "as asked for" in note for note in llm.report.notes)


def test_a_step_without_memory_is_told_with_the_numbers_and_can_be_tried_again(monkeypatch):
    llm = graft.LLM(tiny("llama"))
    params = graft.SamplingParams(max_tokens=4, ignore_eos=True)
    expected = llm.generate([[5, 6, 7]], params)[0].token_ids
    graph = llm.engine.graph

    def cuda(*args):
        raise torch.OutOfMemoryError("allocating 3 GiB failed")

    def cpu(*args):
        torch.empty(1 << 60, dtype=torch.uint8)

    for fail in (cuda, cpu):
        monkeypatch.setattr(llm.engine, "graph", fail)
        with pytest.raises(OutOfMemory, match=r"no memory for a step of 3 tokens \(requests: 1\): .* free on cpu"):
            llm.generate([[5, 6, 7]], params)
        monkeypatch.setattr(llm.engine, "graph", graph)
        with monkeypatch.context() as patch, pytest.raises(OutOfMemory):
            patch.setattr("graft.engine.engine.sample", fail)
            llm.generate([[5, 6, 7]], params)
    llm.engine.manager.check()
    assert llm.engine.idle and llm.generate([[5, 6, 7]], params)[0].token_ids == expected


def test_a_model_that_does_not_fit_is_told_with_the_numbers():
    class Large(torch.nn.Linear):
        def to(self, device):
            torch.empty(1 << 60, dtype=torch.uint8)

    with pytest.raises(OutOfMemory, match=r"the model takes 12\.0 KiB, but cpu has .* free"):
        on_device(Large(32, 93), CPU)
    with pytest.raises(RuntimeError, match="other"):
        on_device(type("Other", (), {"to": lambda self, device: (_ for _ in ()).throw(RuntimeError("other"))})(), CPU)
