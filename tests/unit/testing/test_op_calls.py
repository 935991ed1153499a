"""Ops of an author in tests: what they do beside their schemas, and how far from float64 they are."""

from __future__ import annotations

import pytest
import torch

import faulty_ops  # noqa: F401
from graft.testing import assert_near_float64, assert_op_safe

GATED = torch.ops.faulty.gated.default


def given(fault=""):
    torch.manual_seed(0)
    return torch.randn(3, 8), torch.randn(3, 8), fault


def test_an_op_that_keeps_to_its_schema_passes_and_its_arguments_stay():
    args = given()
    before = [tensor.clone() for tensor in args[:2]]
    assert_op_safe(GATED, args)
    assert all(torch.equal(*pair) for pair in zip(before, args, strict=False))


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("writes its input", "it writes into its argument up and does not declare it"),
        ("every other call", "it gives another result in a second run"),
    ],
)
def test_what_an_op_does_beside_its_schema_fails_in_four_lines(fault, told):
    with pytest.raises(AssertionError) as raised:
        assert_op_safe(GATED, given(fault), opchecks=())
    lines = str(raised.value).splitlines()
    assert lines[0] == "expected: faulty.gated.default does what its schema says" and told in lines[1]
    assert any(line.startswith("what to do:") for line in lines[:4])


def test_torchs_own_findings_are_told():
    with pytest.raises(AssertionError, match="opcheck"):
        assert_op_safe(GATED, given("writes its input"), opchecks=("test_schema",))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_are_held_to_a_few_roundings_of_the_dtype(dtype):
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact, right = x.double().sin(), x.sin()
    assert_near_float64(right, exact, wrong=right * 1.02)
    assert_near_float64((right, [right]), (exact, [exact]), like=(right, [right]), wrong=(right, [right * 1.02]))
    for factor, like in ((1.02, None), (1.02, right)):
        with pytest.raises(AssertionError, match="off by"):
            assert_near_float64(right * factor, exact, like=like)
    assert_near_float64((x.float().sin()).to(dtype), exact, like=right)


def test_a_factor_that_hides_below_each_rounding_shows_in_the_mean():
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    near = (x.float().sin() * 1.001).bfloat16()
    with pytest.raises(AssertionError, match="off in the mean by"):
        assert_near_float64(near, x.double().sin(), like=x.sin())


def test_a_wrong_variant_that_passes_fails_and_so_do_other_shapes():
    x = torch.randn(8)
    with pytest.raises(AssertionError, match="wrong variant"):
        assert_near_float64(x, x.double(), wrong=x * (1 + 2**-23))
    with pytest.raises(AssertionError, match="off by"):
        assert_near_float64(x[:4], x.double())
    with pytest.raises(AssertionError, match="2 results and not 1"):
        assert_near_float64((x, x), x.double())
