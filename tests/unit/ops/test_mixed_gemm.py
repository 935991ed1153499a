"""int8 and int4 weights widened ahead of Hopper's tensor cores: a kernel that no interpreter runs. What it gives is
tested on a GPU (tests/gpu/test_fused_linear.py); here it is compiled for one, and its tiles are shared out."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu_code import compiled
from graft.ops import OPS
from graft.ops.fused_linear import op
from graft.ops.fused_linear import triton as kernels
from graft.ops.fused_linear.cases import LinearCase, make
from graft.ops.fused_linear.mixed_sizes import shares, sizes_for
from graft.ops.selection import problem_of

SPEC = OPS["fused_linear"]
KERNEL = SPEC.kernel("mixed_gemm")
MOST_SHARED = 227 << 10  # of a program on Hopper


def call(dtype=torch.bfloat16, **case):
    shape = LinearCase(**{"rows": 70, "n": 24, "k": 512, "weight": "int8"} | case)
    return SPEC.call(*make(shape, "cpu", dtype, torch.Generator().manual_seed(0)))


@pytest.fixture
def hopper(monkeypatch):
    """As if this were one: what is said about calls does not depend on it."""
    monkeypatch.setattr(op, "gluon_missing", lambda device: None)
    monkeypatch.setattr(op, "needs_triton", lambda *tensors: None)


def test_no_other_device_runs_it():
    assert "is no CUDA device" in problem_of(KERNEL, call())


@pytest.mark.parametrize(
    ("case", "dtype", "reason"),
    [
        ({}, torch.float16, "bfloat16 with int8 and int4"),
        ({}, torch.float32, "bfloat16 with int8 and int4"),
        ({"weight": "fp8"}, torch.bfloat16, "not torch.bfloat16 with torch.float8_e4m3fn"),
        ({"weight": "plain"}, torch.bfloat16, "not torch.bfloat16 with torch.bfloat16"),
        ({"n": 20}, torch.bfloat16, "20 rows of 512 values are no multiple"),
        ({"k": 508}, torch.bfloat16, "24 rows of 508 values are no multiple"),
    ],
)
def test_what_it_does_not_take_is_refused_by_name(hopper, case, dtype, reason):
    assert reason in problem_of(KERNEL, call(dtype, **case))


@pytest.mark.parametrize("weight", ["int8", "int4"])
def test_what_it_takes(hopper, weight):
    for case in ({}, {"norm": "plain", "activation": "silu"}, {"residual": True, "bias": True}, {"k": 1096}):
        assert problem_of(KERNEL, call(weight=weight, **case)) is None


def test_rows_that_the_copy_engine_cannot_read_are_refused(hopper):
    args = call()
    wide = torch.zeros(1, 70, 513, dtype=torch.bfloat16)
    for x, bad in (
        (wide[..., :512], True),
        (wide[..., 1:], True),
        (torch.zeros(1, 70, 512, dtype=torch.bfloat16), False),
    ):
        problem = problem_of(KERNEL, SPEC.call(x, args.weight, None, args.scale))
        assert (problem is not None and "16 bytes at a time" in problem) == bad
    nothing = SPEC.call(torch.zeros(1, 0, 512, dtype=torch.bfloat16), args.weight, None, args.scale)
    assert problem_of(KERNEL, nothing) == "there are no tokens"


@pytest.mark.parametrize(
    ("case", "dtype", "taken"),
    [
        ({}, torch.bfloat16, True), ({"rows": 20}, torch.bfloat16, False), ({"rows": 64}, torch.bfloat16, False),
        ({}, torch.float16, False), ({"n": 20}, torch.bfloat16, False), ({"k": 508}, torch.bfloat16, False),
    ],
)  # fmt: skip
def test_measurements_of_a_default_have_it_where_graphs_would(monkeypatch, case, dtype, taken):
    """fp16 would be read as bfloat16."""
    monkeypatch.setattr(kernels, "gluon_missing", lambda device: None)
    args = call(dtype, **case)
    linear = kernels.LinearCall(args.x.flatten(0, -2), args.weight, scale=args.scale)
    assert kernels.is_mixed(linear) == taken


@given(st.integers(1, 5000), st.integers(1, 200), st.integers(1, 200))
def test_every_tile_is_done_and_no_share_is_empty(tiles, units, programs):
    whole, splits = shares(tiles, units, programs)
    assert 0 <= whole <= tiles and 1 <= splits <= units
    assert splits > 1 or whole == tiles


@pytest.mark.parametrize(
    ("tiles", "units", "expected"),
    [
        (448, 32, (396, 2)),
        (128, 112, (128, 1)),
        (32, 32, (0, 4)),
        (192, 32, (132, 2)),
        (1, 1, (1, 1)),
        (224, 32, (224, 1)),
    ],
)
def test_tiles_are_shared_out_as_was_fastest(tiles, units, expected):
    """On an H200 with 132 multiprocessors."""
    assert shares(tiles, units, 132) == expected


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("tokens", [1, 64, 65, 128, 129, 5000])
def test_tiles_fit_into_shared_memory_and_results_where_the_words_were(kind, tokens):
    how = sizes_for(tokens, kind)
    words, x = how.rows * 32 * 2 * (2 if kind == "int8" else 1), how.tokens * 32 * 2 * 2
    assert how.ahead * words + how.stages * x < MOST_SHARED
    assert how.ahead * words >= how.tokens * how.rows * 2


def test_it_compiles_for_hopper_and_its_products_do_not_wait_for_each_other():
    """Serialized, as the compiler makes them that reuses their registers, each product has a wait of its own."""
    said = compiled()
    assert said.returncode == 0, said.stderr
    lines = re.findall(r"widened (\w+) (\d+) spilled (\d+) (\d+) waits (\d+) of (\d+) shared (\d+)", said.stdout)
    assert lines
    for kind, tokens, stack, local, waits, products, shared in lines:
        assert (local, waits) == ("0", "4") and int(stack) <= 8, (kind, tokens)  # two registers, behind the loop
        assert int(products) >= 16 and int(shared) < MOST_SHARED, (kind, tokens)
