"""fuse_rope: what is no rotation, or one that the op cannot say, is refused."""

from __future__ import annotations

import pytest
import torch

from graft.ir.io.text import graph_text
from rope_cases import B, D, H, R, S, angles, every_two, fuse, llama, meta_heads_first, randn, unbound_parts

# ── what must not match ─────────────────────────────────────────────────────────────────────────────────────────


def backwards(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((x[..., half:], -x[..., :half]), -1) * sin


def backwards_parts(x, cos, sin):
    x1, x2 = x.chunk(2, -1)
    return torch.cat((x1 * cos + x2 * sin, x2 * cos - x1 * sin), -1)


def uneven(x, cos, sin):
    return x * cos + torch.cat((-x[..., 6:], x[..., :6]), -1) * sin


def not_swapped(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., :half], x[..., half:]), -1) * sin


def other_slice(x, cos, sin):
    a, b = x[..., :R], x[..., 4 : 4 + R]
    half = R // 2
    return a * cos + torch.cat((-b[..., half:], b[..., :half]), -1) * sin


def two_tensors(x, cos, sin):
    half, y = x.shape[-1] // 2, x.exp()
    return x * cos + torch.cat((-x[..., half:], y[..., :half]), -1) * sin


def swapped(x, angle):
    return llama(x, angle.sin(), angle.cos())


def swapped_parts(x, angle):
    return unbound_parts(x, angle.sin(), angle.cos())


def other_angles(x, cos, sin):
    x1, x2 = x.chunk(2, -1)
    return torch.cat((x1 * cos - x2 * sin, x2 * sin + x1 * cos), -1)


def halves_as_pairs(x, cos, sin):
    x1, x2 = x.chunk(2, -1)
    return torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).flatten(-2)


def second_reader(x, cos, sin):
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos + turned * sin, turned.exp()


def returned_inside(x, cos, sin):
    product = x * cos
    return product + every_two(x) * sin, product


def stays_wide(x, cos, sin):
    return x * cos + every_two(x) * sin


def one_wide(x, cos, sin):
    return (x * cos.to(x.dtype) + every_two(x) * sin).to(x.dtype)


def written(x, cos, sin):
    y = x.clone()
    a, b = y * cos, every_two(y)
    y.add_(1)
    return a + b * sin


WHOLE, HALF = (B, 1, S, D), (B, 1, S, D // 2)
REFUSED = {
    "rotates backwards": (backwards, WHOLE, "rotates backwards"),
    "rotates backwards, minus": (lambda x, c, s: x * c - every_two(x) * s, WHOLE, "rotates backwards"),
    "rotates backwards, parts": (backwards_parts, HALF, "rotates backwards"),
    "uneven halves": (uneven, WHOLE, "is no half of a head"),
    "parts not swapped": (not_swapped, WHOLE, "does not swap"),
    "another slice": (other_slice, (B, 1, S, R), "does not read"),
    "two tensors": (two_tensors, WHOLE, "parts of different tensors"),
    "other angles for the second half": (other_angles, HALF, "different angles"),
    "halves as pairs": (halves_as_pairs, HALF, "joins halves as pairs"),
    "an angle a head": (llama, (B, H, S, D), "differ between heads"),
    "an angle a head, pairs": (stays_wide, (1, H, S, D), "differ between heads"),
    "one angle for the head": (llama, (B, 1, S, 1), "broadcast over the head"),
    "x is broadcast": (lambda x, c, s: llama(x[:1], c, s), WHOLE, "which is broadcast"),
    "a second reader": (second_reader, WHOLE, "has a second reader"),
    "an inner value returned": (returned_inside, WHOLE, "has a second reader"),
    "two dims": (lambda x, c, s: llama(x[0, 0], c[0, 0], s[0, 0]), WHOLE, "x has 2 dims; the op takes"),
    "five dims": (lambda x, c, s: llama(x[None], c[None], s[None]), WHOLE, "x has 5 dims; the op takes"),
    "packed tokens, an angle a head": (lambda x, c, s: llama(x[0], c[0], s[0]), (B, H, S, D), "differ between heads"),
    "written in between": (written, WHOLE, "is written in place"),
}


@pytest.mark.some(10)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_rotation_is_refused_byte_for_byte(name):
    function, angle_shape, reason = REFUSED[name]
    gm, record, before = fuse(function, (randn(B, H, S, D), *angles(*angle_shape)))
    assert record.status == "no_match" and reason in record.reason, record
    assert graph_text(gm.graph) == before


@pytest.mark.parametrize(
    ("function", "reason"), [(stays_wide, "stays torch.float32"), (one_wide, "what it is added to is torch.float32")]
)
def test_mixed_dtypes_that_the_op_would_round_elsewhere_are_refused(function, reason):
    gm, record, before = fuse(function, (randn(B, H, S, D, dtype=torch.bfloat16), *angles(*WHOLE)))
    assert record.status == "no_match" and reason in record.reason, record
    assert graph_text(gm.graph) == before


@pytest.mark.parametrize(("function", "shape"), [(swapped, WHOLE), (swapped_parts, HALF)])
def test_swapped_cos_and_sin_are_refused(function, shape):
    gm, record, before = fuse(function, (randn(B, H, S, D), randn(*shape)))
    assert record.status == "no_match" and "cos and sin are swapped" in record.reason, record
    assert graph_text(gm.graph) == before


def test_an_odd_number_of_values_is_refused():
    gm, record, before = fuse(llama, (randn(B, H, S, 7), *angles(B, 1, S, 7)))
    assert record.status == "no_match" and "an odd number" in record.reason, record
    assert graph_text(gm.graph) == before


@pytest.mark.parametrize(
    ("freqs", "function", "reason"),
    [
        (
            torch.polar(torch.ones(S, D // 2), torch.ones(S, D // 2)),
            lambda x, f: meta_heads_first(x, f.conj()),
            "conj",
        ),
        (torch.ones(S, D // 2, dtype=torch.complex128), meta_heads_first, "complex128"),
        (torch.ones(H, S, D // 2, dtype=torch.complex64), meta_heads_first, "differ between heads"),
    ],
)
def test_complex_spellings_that_the_op_cannot_say_are_refused(freqs, function, reason):
    gm, record, before = fuse(function, (randn(B, H, S, D), freqs))
    assert record.status == "no_match" and reason in record.reason, record
    assert graph_text(gm.graph) == before


def test_a_graph_without_rotation_says_so():
    _, record, _ = fuse(lambda x: x.exp() + x * 2, (randn(2, 3),))
    assert record.reason == "nothing in the graph rotates parts of a head by cos and sin"
