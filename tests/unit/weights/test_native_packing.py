"""Weights packed for the native product: what the tiles stand for, GGUF's blocks, sizes, and bad input."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.base.errors import PackingError
from graft.weights.native_tiles import CPP, TILES_AT_ONCE, pack, pack_gguf, unpack
from marks import examples


def weight(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.1


def raw_of(quant: str, n: int, k: int) -> torch.Tensor:
    """Bytes of a weight [n, k] in GGUF's blocks."""
    if quant != "Q4_K":
        kind = getattr(gguf.GGMLQuantizationType, quant)
        return torch.from_numpy(gguf.quants.quantize(weight(n, k).numpy(), kind))
    g = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 256, (n, k // 256, 144), dtype=torch.uint8, generator=g)
    pairs = (torch.rand(n, k // 256, 2, generator=g) * 1e-3 + 1e-4).half()
    raw[..., :4] = pairs.view(torch.uint8).view(n, k // 256, 4)
    return raw.flatten(1)


def meant(quant: str, raw: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.array(gguf.quants.dequantize(raw.numpy(), getattr(gguf.GGMLQuantizationType, quant))))


@settings(max_examples=examples(60), deadline=None)
@given(n=st.integers(1, 40), k=st.integers(1, 100), kind=st.sampled_from(list(CPP)), gated=st.booleans(),
       dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))  # fmt: skip
def test_unpack_is_the_inverse(n, k, kind, gated, dtype):
    n *= 2 if gated else 1
    w = weight(n, k).to(dtype)
    found = unpack(pack(w, kind, gated))
    assert found.shape == (n, k) and found.dtype is torch.float32
    blocks = torch.nn.functional.pad(w.float(), (0, -k % 32)).view(n, -1, 32)
    spread = (blocks.amax(2) - blocks.amin(2)).repeat_interleave(32, 1)[:, :k]
    largest = blocks.abs().amax(2).repeat_interleave(32, 1)[:, :k]
    # half a step, and what a float16 scale and minimum round
    slack = {"f32": 0 * largest, "bf16": w.float().abs() * 2**-8, "q8": largest * (0.5 / 127 + 2**-10),
             "q4": spread * (0.5 / 15 + 2**-9) + largest * 2**-10,
             "f16": w.float().abs() * 2**-11 + w.float().abs().max() * 2**-24}[kind]  # fmt: skip
    if kind == "f16" and dtype is torch.bfloat16:  # 8 bits fit, but for numbers that are nothing beside the largest
        slack = slack.max() * 2**-13 * torch.ones_like(slack)
    assert ((found - w.float()).abs() <= slack + 1e-6 * (kind[0] == "q")).all()


def test_rows_go_to_lanes():
    w = torch.arange(32 * 8, dtype=torch.float32).view(32, 8)
    tiles = pack(w, "f32").data.view(torch.float32).view(2, 8, 16)  # [tile, column, row]
    assert torch.equal(tiles[1, 3], w[16:, 3])
    pairs = pack(w, "bf16").data.view(torch.bfloat16).view(2, 4, 16, 2)
    assert torch.equal(pairs[0, 3, 5].float(), w[5, 6:8])
    gated = pack(w, "f32", gated=True).data.view(torch.float32).view(2, 8, 16)
    assert torch.equal(gated[0, 0], w[:16, 0]) and torch.equal(gated[1, 0], w[16:, 0])
    four = pack(torch.arange(16).repeat(2)[None].float(), "q4").data  # one row: 0 .. 15, 0 .. 15
    assert four[64:].view(4, 16, 4)[:, 0].flatten().tolist() == [17 * i for i in range(16)]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("quant", ["Q8_0", "Q4_0", "Q4_1", "Q4_K"])
def test_gguf_blocks_keep_their_numbers(quant, gated):
    raw = raw_of(quant, 96, 512)
    packed = pack_gguf(raw, quant, gated)
    found, want = unpack(packed), meant(quant, raw)
    assert found.shape == want.shape
    if quant == "Q4_K":  # scales and minimums of sub-blocks are rounded to float16
        parts = want.abs().view(96, -1, 32).amax(2).repeat_interleave(32, 1)
        assert ((found - want).abs() <= 2**-10 * (parts + 0.063 * 1.1)).all() and not torch.equal(found, want)
    else:
        assert torch.equal(found, want)
    assert not torch.allclose(found, want.flip(0), atol=1e-3)
    assert packed.data.numel() <= 1.15 * raw.numel()


def test_packed_sizes():
    for n, k in ((960, 576), (576, 1536), (49152, 32)):
        w = torch.zeros(n, k)
        sizes = {kind: pack(w, kind).data.numel() * 8 / (n * k) for kind in CPP}
        assert sizes.pop("f16") == 16 + 32 / k  # one line a tile
        assert sizes == {"f32": 32, "bf16": 16, "q8": 8.5, "q4": 5}


def test_16_bits_take_weights_of_any_size():
    w = weight(40, 24)
    w[0] *= 2.0**100  # a tile of its own scale
    w[20] *= 2.0**-100
    w[39] = 0
    found = unpack(pack(w, "f16"))
    tiles = torch.tensor([w[:16].abs().max(), w[16:32].abs().max(), w[32:].abs().max()])
    assert ((found - w).abs() <= w.abs() * 2**-11 + tiles.repeat_interleave(16)[:40, None] * 2**-24).all()
    bad = torch.ones(16, 8)
    bad[3, 4], bad[5, 0] = float("nan"), float("inf")
    found = unpack(pack(bad, "f16"))
    assert found[3, 4].isnan() and found[5, 0].isinf() and int(found.isfinite().sum()) == 16 * 8 - 2
    assert torch.equal(unpack(pack(torch.zeros(3, 5), "f16")), torch.zeros(3, 5))
    huge = torch.ones(16, 8)
    huge[3, 4] = 1.5 * 2.0**127
    assert torch.equal(unpack(pack(huge.bfloat16(), "f16")), torch.where(huge > 1, huge, 0.0))


def test_packing_16_bits_takes_little_memory_beside():
    """Measured by what torch allocates: a head of a vocabulary must not be there in float32 as a whole."""
    w = torch.zeros(TILES_AT_ONCE * 16 * 6, 64, dtype=torch.bfloat16)
    with torch.profiler.profile(profile_memory=True) as profile:
        pack(w, "f16")
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest <= 1.1 * w.nbytes


def test_special_weights():
    for kind in ("q8", "q4"):
        zero = pack(torch.zeros(16, 32), kind)
        assert torch.equal(unpack(zero), torch.zeros(16, 32))
        same = torch.full((16, 32), 0.25)
        assert torch.allclose(unpack(pack(same, kind)), same, atol=1e-3)
        bad = torch.ones(16, 64)
        bad[3, 40] = float("nan")
        found = unpack(pack(bad, kind))
        assert found[3, 32:].isnan().all() and found[3, :32].isfinite().all() and found[4].isfinite().all()


def test_bad_input_has_one_clear_error():
    with pytest.raises(PackingError, match="'q5' is no kind of packed weight; known: f32, bf16, q8, q4"):
        pack(torch.zeros(16, 32), "q5")
    with pytest.raises(PackingError, match="17 rows"):
        pack(torch.zeros(17, 32), "f32", gated=True)
    with pytest.raises(PackingError, match="Q6_K has no packed form"):
        pack_gguf(torch.zeros(16, 210, dtype=torch.uint8), "Q6_K")
    with pytest.raises(PackingError, match="a multiple of 18"):
        pack_gguf(torch.zeros(16, 20, dtype=torch.uint8), "Q4_0")
    for kind in ("q8", "q4"):
        with pytest.raises(PackingError, match="too large for float16 scales"):
            pack(torch.full((16, 32), 3e7), kind)
