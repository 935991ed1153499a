"""graft::gated_mlp: gate-up, gated activation and down of quantized weights as one op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graft.ops.call import Call
from graft.ops.fused_linear.op import NOT_ROUNDED
from graft.ops.fused_linear.reference import rounds
from graft.ops.gated_mlp.reference import gated_mlp, two_layers
from graft.ops.spec import Kernel, OpSpec, define, needs_triton
from graft.weights.quantize import FP8

# Tokens. With one program a row between the layers: 57 -> 59 us for 16, 152 -> 160 for 512, but in turns 319 -> 312
# for 1,024, 667 -> 646 for 2,048 and 2,651 -> 2,550 for 8,192 (8B, H200).
FEW = 512


def fake(x: Tensor, gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, *_: Any, **__: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], down.shape[0]))


def steps_problem(call: Call) -> str | None:
    """Two calls of graft::fused_linear, each with the kernel that it takes."""
    return needs_triton(call.x, call.gate_up, call.down)


def scaled_problem(call: Call) -> str | None:
    if not call.fp8_from:
        return NOT_ROUNDED
    given = {t.dtype for t in (call.x, call.gate_up_bias, call.down_bias, call.norm, call.residual) if t is not None}
    if len(given) > 1 or call.x.dtype is torch.float64:
        return f"dtypes differ or are float64: {', '.join(sorted(map(str, given)))}"
    if {call.gate_up.dtype, call.down.dtype} != {FP8}:
        return f"it multiplies with float8 weights, not {call.gate_up.dtype} and {call.down.dtype}"
    if not (call.gate_up.is_contiguous() and call.down.is_contiguous()):
        return "a weight does not lie row by row"
    if call.residual is not None and call.residual.dim() != call.x.dim():
        return "the residual is broadcast"
    return steps_problem(call)


def scaled_call_problem(call: Call) -> str | None:
    if not rounds(call.x, call.fp8_from):
        return NOT_ROUNDED
    tokens = call.x.shape[:-1].numel()
    return f"{tokens} tokens: as two layers they are quicker up to {FEW}" if tokens <= FEW else None


def run_scaled(*args: Any) -> Tensor:
    from graft.ops.gated_mlp.scaled import gated_mlp_scaled

    return gated_mlp_scaled(*args)


def run_steps(*args: Any) -> Tensor:
    return two_layers(torch.ops.graft.fused_linear, *args)


define(
    OpSpec(
        name="gated_mlp",
        schema="(Tensor x, Tensor gate_up, Tensor gate_up_scale, Tensor down, Tensor down_scale, str activation,"
        " Tensor? gate_up_bias=None, Tensor? down_bias=None, Tensor? norm=None, float eps=0.0, float offset=0.0,"
        " bool cast_last=False, bool upcast=False, Tensor? residual=None, bool normed=False, int fp8_from=0)"
        " -> Tensor",
        reference=gated_mlp,
        fake=fake,
        kernels=(
            Kernel("scaled_mm", "existing", scaled_problem, run_scaled, varies=scaled_call_problem),
            Kernel("steps", "triton", steps_problem, run_steps),
        ),
    )
)
