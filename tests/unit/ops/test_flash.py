"""Attention of prompts on Hopper: keys and values in contiguous memory, and a kernel that no interpreter runs. What
it gives is tested on a GPU (tests/gpu/test_attention.py); here it is compiled for one."""

from __future__ import annotations

import re

import pytest
import torch

from float8_cases import float8_cache
from gpu_code import compiled
from graft.ops import OPS
from graft.ops.cached_attention import op as attention
from graft.ops.cached_attention.gather.triton import ALIGN, CHUNK, gather, rows_for, starts_kernel
from graft.ops.cached_attention.reference import gather as reference
from graft.ops.paged_batches import make
from marks import FULL

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLAIN = (None, None, False)
NAMES = [argument.name for argument in torch.ops.graft.cached_attention.default._schema.arguments]


def batch(new, old, d=64, dtype=torch.float32, options=PLAIN):
    q, _, _, k_cache, v_cache, _, *rest = make(
        new, old, 8, 2, d, options, DEVICE, dtype, torch.Generator().manual_seed(0)
    )
    return dict(zip(NAMES, (q, k_cache, v_cache, *rest), strict=True))


@pytest.mark.parametrize("d", [64, 80])
@pytest.mark.parametrize("float8", [False, True])
def test_sequences_are_gathered_with_zeros_behind_them(float8, d):
    args = batch((3, 200, 1, 128), (0, 77, 4, 0), d)
    caches = [args["k_cache"], args["v_cache"]]
    if float8:
        caches = [float8_cache(cache) for cache in caches]
    lengths = args["lens_cpu"][:, 1]
    rows = rows_for(lengths)
    assert rows == (1 + 3 + 1 + 1) * ALIGN
    *found, starts = gather(*caches, args["block_tables"], args["seq_lens"], rows, torch.float32)
    assert starts.tolist() == [0, ALIGN, 4 * ALIGN, 5 * ALIGN, rows]
    for cache, own in zip(caches, found, strict=True):
        for i, length in enumerate(lengths.tolist()):
            expected = reference(cache, args["block_tables"][i], length, torch.float32)[0].transpose(0, 1)
            mine = own[starts[i] : starts[i + 1]]
            assert torch.equal(mine[:length], expected)
            assert not mine[length:].any(), "what lies behind a sequence is nobody's"


def test_many_sequences_begin_behind_each_other():
    lengths = torch.arange(1500, device=DEVICE) % 300 + 1
    starts = torch.empty(1501, dtype=torch.int64, device=DEVICE)
    starts_kernel[(1,)](lengths, starts, 1500, ALIGN=ALIGN, CHUNK=CHUNK)
    padded = (lengths + ALIGN - 1) // ALIGN * ALIGN
    assert starts.tolist() == [0, *padded.cumsum(0).tolist()]


@pytest.fixture
def hopper(monkeypatch):
    """As if the kernels ran here."""
    for name in ("gluon_missing", "triton_problem"):
        monkeypatch.setattr(attention, name, lambda *_: None)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, None),
        ({"softcap": 30.0}, "no soft cap"),
        ({"sinks": torch.zeros(8)}, "no sinks"),
        ({"scale": -1.0}, "a positive scale"),
        ({"window": 100}, None),
        ({"q": torch.zeros(1, 8, 200, 64)}, "16 bits"),
        ({"q": torch.zeros(1, 8, 200, 80, dtype=torch.float16)}, "heads of 64, 128, 256"),
        ({"q": torch.zeros(1, 256, 200, 64, dtype=torch.float16)}, "up to 64 query heads"),
    ],
)
@pytest.mark.usefixtures("hopper")
def test_what_it_does_not_take_it_names(change, told):
    args = batch((200,), (0,), dtype=torch.float16) | change
    problem = attention.flash_problem(OPS["cached_attention"].call(*args.values()))
    assert problem is None if told is None else told in problem


@pytest.mark.parametrize(
    ("new", "old", "most", "told"),
    [
        ((200,), (0,), None, None),
        ((1, 1, 64, 70), (400, 5, 0, 3), None, None),
        ((1, 63), (9, 4000), None, "fewer than 64 tokens"),
        ((100, 10), (0, 0), None, "fewer than 64 tokens"),
        ((200,), (0,), 1 << 10, "would be gathered"),
    ],
)
@pytest.mark.usefixtures("hopper")
def test_calls_that_it_is_not_made_for(new, old, most, told, monkeypatch):
    if most:
        monkeypatch.setattr(attention, "FLASH_BYTES", most)
    problem = attention.flash_call_problem(OPS["cached_attention"].call(*batch(new, old).values()))
    assert problem is None if told is None else told in problem


def test_a_cpu_has_no_gluon():
    args = batch((200,), (0,), dtype=torch.float16)
    if DEVICE == "cpu":
        assert "no CUDA device" in attention.flash_problem(OPS["cached_attention"].call(*args.values()))


def test_it_compiles_for_a_gpu_without_spilling():
    """The product with the values is in flight while the scores are waited for, once in each warpgroup's loop."""
    sizes = [256, 128] if FULL else [256]  # the larger one is short of registers
    done = compiled()
    lines = re.findall(r"^(\d+) spilled (\d+) (\d+) in flight (\d+) shared (\d+)$", done.stdout, re.MULTILINE)
    assert [int(line[0]) for line in lines] == sizes, done.stderr
    for _, stack, local, flying, shared in lines:
        assert (stack, local) == ("0", "0") and int(flying) == 2 and int(shared) <= 227 * 1024
