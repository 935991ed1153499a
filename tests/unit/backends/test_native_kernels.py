"""Native kernels of norms, products and experts against float64 references, in poisoned memory."""

from __future__ import annotations

import pytest

from native_cases import check_op, needs_compiler, poisoned

pytestmark = needs_compiler


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "op",
    ["rms_norm", "add_rms_norm", "layer_norm", "swiglu", "linear", "fused_linear", "moe_route", "moe_experts",
     "packed_embedding"],
)  # fmt: skip
def test_kernels_agree_with_float64_and_a_wrong_one_does_not(op, monkeypatch):
    monkeypatch.setattr("graft.backends.native.call.fresh", poisoned)
    check_op(op)
