"""Packed experts in the native step, beside float64 with rows rounded as the GEMM rounds them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from graft.ops.cases import randn
from graft.ops.moe_experts.reference import gated, weighted_sum
from graft.weights.stacked import StackLayout, pack_stacked, unpack_expert
from native_build import OPS, compiled, targets
from native_cases import Built, compile_all, graph_of, needs_compiler, poisoned

pytestmark = needs_compiler
WEIGHTS = frozenset({"gate_up", "down", "gate_up_bias", "down_bias", "gate_up_scale", "down_scale"})
# A quotient that lies between two whole numbers is rounded either way: one activation of many is a step, 1/127, off.
BOUND = 2e-3


@dataclass(frozen=True)
class PackedCase:
    kind: str
    tokens: int
    k: int
    sizes: tuple[int, int, int]  # e, f, d
    activation: str = "silu"
    biases: bool = False
    weigh_input: bool = False
    one: bool = False  # all tokens go to the same experts


# up to 16 pairs every thread prepares the rows, above the team does; sizes beside tiles of 16 rows and blocks of 32
CASES = [
    PackedCase("q8", 1, 2, (4, 48, 64)),
    PackedCase("q4", 1, 3, (5, 40, 72)),
    PackedCase("q8", 11, 3, (6, 33, 40), "gelu"),
    PackedCase("q4", 20, 1, (2, 32, 64), one=True),
    PackedCase("q8", 5, 2, (4, 40, 96), "clamped_swiglu", biases=True),
    PackedCase("q4", 17, 2, (3, 24, 72), "gelu_tanh", biases=True, weigh_input=True),
]


def arguments(case: PackedCase) -> tuple:
    g, (e, f, d) = torch.Generator().manual_seed(1), case.sizes
    orders = [torch.randperm(e, generator=g)[: case.k] for _ in range(case.tokens)]
    ids = torch.stack(orders[:1] * case.tokens if case.one else orders)
    share = torch.softmax(randn(tuple(ids.shape), "cpu", torch.float32, g), -1)
    packed = []
    for shape, layout in (((e, 2 * f, d), StackLayout(gated=True)), ((e, d, f), StackLayout())):
        # no expert's scales are like another's
        weight = randn(shape, "cpu", torch.float32, g) * shape[2] ** -0.5 * (1 + torch.arange(e))[:, None, None]
        packed.append(pack_stacked(weight, case.kind, layout, "w")[:2])
    biases = tuple(randn(s, "cpu", torch.float32, g) for s in ((e, 2 * f), (e, d))) if case.biases else (None, None)
    (gate_up, up_scale), (down, down_scale) = packed
    x = randn((case.tokens, d), "cpu", torch.float32, g)
    return x, share, ids, gate_up, down, case.activation, *biases, False, case.weigh_input, up_scale, down_scale


def eight_bits(row: Tensor) -> Tensor:
    """As the GEMM takes it: blocks of 32, the largest magnitude 127."""
    blocks = F.pad(row, (0, -len(row) % 32)).view(-1, 32)
    most = blocks.abs().amax(1, keepdim=True)
    return (torch.round(blocks * (127 / most.clamp(min=1e-30))) * most / 127).flatten()[: len(row)]


def expected(args: tuple, neighbour: int = 0) -> Tensor:
    """neighbour: whose tiles are read in place of an expert's own."""
    x, share, ids, gate_up, down, activation, up_bias, down_bias, _, weigh_input, up_scale, down_scale = args
    e, results = len(gate_up), []
    for row, slots, own in zip(x, ids.tolist(), share, strict=True):
        for weight, expert in zip(own, slots, strict=True):
            other = (expert + neighbour) % e
            up, back = (
                unpack_expert(q, scale, other, columns, torch.float64, is_up)
                for q, scale, columns, is_up in (
                    (gate_up, up_scale, len(row), True),
                    (down, down_scale, up_scale.shape[1] // 2, False),
                )
            )
            h = up @ eight_bits(row * weight if weigh_input else row).double()
            h = gated(h if up_bias is None else h + up_bias[expert], activation)
            y = back @ eight_bits(h.float()).double()
            results.append(y if down_bias is None else y + down_bias[expert])
    return weighted_sum(torch.stack(results), torch.ones_like(share) if weigh_input else share, torch.float64)


@cache
def built() -> list[Built]:
    graphs = [graph_of(torch.ops.graft.moe_experts.default, arguments(case), WEIGHTS) for case in CASES]
    return compile_all(graphs, [None] * len(graphs), len(graphs))[0]


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("index", range(len(CASES)), ids=[f"{c.kind} {c.tokens} {c.activation}" for c in CASES])
def test_packed_experts_agree_with_float64_and_another_experts_tiles_do_not(index, monkeypatch):
    monkeypatch.setattr("graft.backends.native.call.fresh", poisoned)
    made, args = built()[index], arguments(CASES[index])
    (found,) = made.run(*made.inputs)
    assert off(found, expected(args)) < BOUND
    assert off(found, expected(args, neighbour=1)) > 100 * BOUND
    assert torch.equal(made.run(*made.inputs)[0], found), "every call gives the same bits"


LATE = """
#include "ops/moe_experts/native_packed.h"
using namespace graft;

// numbers: the chunk that is left, experts, f, d, tokens. arrays: ids, scratch. Nothing else is there to be read.
extern "C" void late(void** arrays, const int64_t* number) {
  float* const ids = static_cast<float*>(arrays[0]);
  PackedExpertsArgs a{};
  a.rows = number[4], a.experts = number[1], a.f = number[2], a.d = number[3];
  a.ids = View{ids, 2, 1, 2, 2};
  a.shared = static_cast<float*>(arrays[1]);
  Team team(1);
  std::atomic<int64_t> next{number[0]};
  packed_up<WeightQ8>(team, 0, next, a, static_cast<float*>(arrays[1]));
  next = number[0];
  packed_down<WeightQ4>(team, 0, next, a, static_cast<float*>(arrays[1]));
}
"""


@pytest.mark.parametrize("tokens", [1, 40])
def test_a_thread_that_comes_late_reads_nothing(tokens):
    """The arena's memory of the ids may hold other numbers by then."""
    library = compiled(LATE, ("late",), targets()[0], (f"-I{OPS.parent}",))
    garbage, scratch = np.full(2 * tokens, 1e9, np.float32), np.full(4096, 7, np.float32)
    library.call("late", [garbage, scratch], [10_000, 4, 32, 64, tokens])
    assert (scratch == 7).all()


def test_a_tokens_numbers_do_not_depend_on_the_others():
    made, args = built()[2], arguments(CASES[2])
    (whole,) = made.run(*made.inputs)
    for token in (0, 7):
        rows = [
            t[token : token + 1] if t.dim() == 2 and t.shape[0] == len(args[0]) else t[:, :1] for t in made.inputs
        ]
        assert torch.equal(made.run(*rows)[0], whole[token : token + 1])
