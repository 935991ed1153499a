"""A transform in one file: a soft cap, three kernels that become one op. docs/write_a_transform.md is the long way.

    python examples/write_a_transform.py

A new op would have a folder and a kernel (`graft new-transform fuse_soft_cap --op`); here a reference is enough.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import graft
from graft import PatternTransform, Rewrite, TransformRegistry
from graft.ops.spec import OpSpec, define
from graft.testing import assert_fuses, assert_matches_eager, assert_metadata_preserved, assert_not_fuses

NAME = "fuse_soft_cap"
CONFIG = {"verify": "matches", "transforms": {NAME: {"stage": "match"}}}


def by_hand(x: Tensor, cap: float) -> Tensor:
    return torch.tanh(x / cap) * cap


def fused(x: Tensor, cap: float) -> Tensor:
    return torch.ops.graft.soft_cap(x, cap)


define(OpSpec("soft_cap", "(Tensor x, float cap) -> Tensor", by_hand, lambda x, cap: x.new_empty(x.shape)))  # noqa: ARG005


@TransformRegistry.register(NAME)
class FuseSoftCap(PatternTransform):
    """tanh(x / cap) * cap becomes one op.

    before:  %d = div(%x, cap);  %t = tanh(%d);  %y = mul(%t, cap)
    after:   %y = graft.soft_cap(%x, cap)

    Numerics: bitwise with the reference.
    """

    def rewrites(self) -> Sequence[Rewrite]:
        return [Rewrite(by_hand, fused, {"x": "b s d"})]


class Head(nn.Module):
    """Logits with a cap. keep: the values inside are returned too, so that they cannot go away."""

    def __init__(self, cap: float = 30.0, keep: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project, self.cap, self.keep = nn.Linear(8, 16), cap, keep

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        inner = torch.tanh(self.project(x) / self.cap)
        logits = inner * self.cap
        return (logits, inner) if self.keep else logits


def main() -> None:
    x = torch.randn(2, 3, 8)
    trial = assert_fuses(Head(), (x,), NAME, count=1, config=CONFIG)
    print(f"before\n{trial.before}\nafter\n{trial.after}")
    assert_metadata_preserved(Head(), (x,), NAME, config=CONFIG)
    assert_matches_eager(Head(), (x,), NAME, dtype=torch.bfloat16, wrong=Head(cap=20.0), config=CONFIG)
    print("numbers, shapes, modules and source lines are kept; a head with another cap is told apart")

    refused = assert_not_fuses(Head(keep=True), (x,), NAME, reason="second reader", config=CONFIG)
    for miss in refused.record.near_misses:
        print(f"near miss at {miss.anchor}: {miss.reason}")

    compiled = graft.compile(Head(), (x,), config=CONFIG)
    print(compiled.report.transforms[NAME].summary)
    print(f"graft::soft_cap: {compiled.report.kernels['graft::soft_cap']}")


if __name__ == "__main__":
    main()
