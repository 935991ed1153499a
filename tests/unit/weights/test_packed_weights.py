"""Tiles as weights of a graph: what the reference makes of them, rounding that is checked, and what has no tiles."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.base.errors import PackingError, QuantizationError
from graft.ops import OPS
from graft.weights import pack_rows
from graft.weights.native_tiles import pack, unpack
from graft.weights.pack_rows import pack_checked
from graft.weights.tiles import BLOCK_BYTES, COLUMN_BYTES, from_graph, in_graph, kind_of, unpack_rows
from marks import examples

KINDS = [*BLOCK_BYTES, *COLUMN_BYTES]  # that a graph may hold

fused_linear = torch.ops.graft.fused_linear


def weight(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * k**-0.5


@settings(max_examples=examples(60), deadline=None)
@given(n=st.integers(1, 40), k=st.integers(1, 200), kind=st.sampled_from(KINDS), gated=st.booleans())
def test_the_graph_form_keeps_what_was_packed(n, k, kind, gated):
    packed = pack(weight(2 * n, k), kind, gated)
    tiles, scale = in_graph(packed)
    found = from_graph(tiles, scale, k, gated)
    assert (found.kind, found.rows, found.columns, found.gated) == (kind, 2 * n, k, gated)
    assert torch.equal(unpack(found), unpack(packed))
    assert tiles.data_ptr() == packed.data.data_ptr() and scale.nbytes == 0, "no second copy"


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_read_one_by_one(kind):
    packed = pack(weight(37, 70), kind)
    ids = torch.tensor([[36, 0, 17], [5, 5, 16]])
    assert torch.equal(unpack_rows(*in_graph(packed), ids, 70), unpack(packed)[ids])
    with pytest.raises(IndexError, match="37"):
        OPS["packed_embedding"].reference(*in_graph(packed), ids + 1, 70, torch.float32)


def test_tiles_of_another_width_are_refused():
    with pytest.raises(PackingError, match="tiles of 999 bytes"):
        kind_of(999, 64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_the_product_is_that_of_what_the_tiles_stand_for(kind, activation):
    gated = activation != "none"
    x, w, norm = weight(5, 72, 1)[None], weight(64, 72), weight(1, 72, 2)[0]
    packed = pack(w, kind, gated)
    tiles, scale = in_graph(packed)
    options = (norm, 1e-5, 0.0, False, activation)
    found = fused_linear(x, tiles, None, scale, *options)
    assert found.shape == (1, 5, 32 if gated else 64)
    assert torch.allclose(found, fused_linear(x, unpack(packed), None, None, *options), atol=1e-6)
    if gated:
        wrong = fused_linear(x, in_graph(pack(w, kind))[0], None, scale, *options)
        assert not torch.allclose(wrong, found, atol=1e-4), "tiles that take no turns"


@pytest.mark.parametrize("kind", ["q8", "q4"])
@pytest.mark.parametrize("gated", [False, True])
def test_pieces_are_the_whole(kind, gated, monkeypatch):
    """Weights larger than a piece are packed a few tiles at a time, with the same bytes."""
    monkeypatch.setattr(pack_rows, "PIECE", 72 * 16)
    w = weight(94, 72)
    packed, rounding = pack_checked(w, kind, gated)
    assert torch.equal(packed.data, pack(w, kind, gated).data)
    assert 0.2 < rounding.steps <= 0.5
    error = float((unpack(packed) - w).norm() / w.norm())
    assert rounding.relative == pytest.approx(error, rel=1e-4)


@settings(max_examples=examples(40), deadline=None)
@given(
    n=st.integers(1, 20), k=st.integers(1, 90), kind=st.sampled_from(["q8", "q4"]), exponent=st.integers(-12, 3),
    shift=st.sampled_from([0.0, 1.0, 50.0]),
)  # fmt: skip
def test_any_finite_weight_is_within_rounding(n, k, kind, exponent, shift):
    pack_checked((weight(n, k) + shift) * 10.0**exponent, kind, False)


@pytest.mark.parametrize("kind", ["q8", "q4"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_that_are_no_numbers_are_an_error(kind, bad):
    w = weight(20, 40)
    w[3, 7] = bad
    with pytest.raises(QuantizationError, match=r"model\.w holds NaN or infinity"):
        pack_checked(w, kind, False, "model.w")
    with pytest.raises(QuantizationError, match="float64"):
        pack_checked(w.double(), kind, False)


@pytest.mark.parametrize("kind", ["q8", "q4"])
def test_more_than_rounding_is_noticed(kind, monkeypatch):
    def wrong(piece, kind, gated):
        packed = pack(piece, kind, gated)
        packed.data[0:2] = torch.tensor([1.0], dtype=torch.float16).view(torch.uint8)  # the scale of row 0
        return packed

    monkeypatch.setattr(pack_rows, "pack", wrong)
    with pytest.raises(QuantizationError, match="times as far off"):
        pack_checked(weight(20, 40), kind, False)
