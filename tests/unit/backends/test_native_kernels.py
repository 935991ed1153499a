"""Native kernels of norms, products and experts against float64 references, in poisoned memory."""

from __future__ import annotations

import pytest
import torch

from graft.backends.native.emit import emit
from graft.backends.native.regions import split
from native_cases import WEIGHTS, check_op, graph_of, needs_compiler, poisoned

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


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("gelu", False, None, False, 0, False), "a.act = Act::gelu; a.glu = false;"),
        (("none", False, torch.zeros(1, 3, 8), False, 0, True, 0.0), "a.glu = true; a.alpha = 0.0f;"),
    ],
)
def test_a_field_that_is_not_zero_by_itself_is_assigned_to(given, told):
    """Left out, an activation without a gate was computed as one with a gate, from weights behind its own."""
    op, x, weight = torch.ops.graft.fused_linear.default, torch.zeros(1, 3, 16), torch.zeros(8, 16)
    args = (x, weight, None, None, None, 0.0, 0.0, False, *given)
    (region,) = split(graph_of(op, args, WEIGHTS["fused_linear"]).gm, {}).regions
    assert told in " ".join(emit([region.program], "").step.split())
