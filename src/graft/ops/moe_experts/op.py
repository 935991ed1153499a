"""graft::moe_experts(x, weights, ids, gate_up, down, activation)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from graft.ops.linear.reference import linear_float32
from graft.ops.moe_experts.reference import moe_experts, sorted_experts, weighted_sum
from graft.ops.narrow import widen_problem
from graft.ops.spec import Kernel, OpSpec, define, needs_triton
from graft.ops.swiglu.reference import swiglu


def fake(x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, activation: str = "silu") -> Tensor:
    return x.new_empty(x.shape)


def aten_supports(x: Tensor, *_: object) -> str | None:
    return None if x.device.type == "cpu" else f"it asks for the size of each group, which stalls {x.device}"


def run_aten(
    x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, activation: str = "silu"
) -> Tensor:
    """Matrix products expert by expert. One token needs no sorting, which halves the time of small experts."""
    if x.shape[0] != 1:
        return moe_experts(x, weights, ids, gate_up, down, activation)
    f = down.shape[2]
    product = linear_float32 if widen_problem(x, gate_up, down) is None else F.linear
    rows = []
    for expert in ids.reshape(-1).tolist():
        hidden = product(x, gate_up[expert])  # [1, 2f]
        rows.append(product(swiglu(hidden[:, :f], hidden[:, f:], activation), down[expert]))
    return weighted_sum(torch.cat(rows), weights, x.dtype)


def grouped_mm_supports(
    x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, *_: object
) -> str | None:
    if x.device.type != "cuda":
        return f"torch's grouped_mm is used on a GPU alone, the tensors are on {x.device}"
    if not x.dtype == gate_up.dtype == down.dtype == torch.bfloat16:
        return f"torch's grouped_mm takes bfloat16, not {x.dtype}"
    if torch.cuda.get_device_capability(x.device) < (8, 0):
        return "torch's grouped_mm needs compute capability 8.0"
    if gate_up.shape[-1] % 8 or down.shape[-1] % 8:
        return "torch's grouped_mm needs rows of a multiple of 16 bytes"
    return None


def run_grouped_mm(
    x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, activation: str = "silu"
) -> Tensor:
    def product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return F.grouped_mm(rows, weight, offs=ends.to(torch.int32))

    return sorted_experts(x, weights, ids, gate_up, down, activation, product)


def triton_supports(x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, *_: object) -> str | None:
    if not x.dtype == gate_up.dtype == down.dtype:
        return f"x is {x.dtype}, gate_up {gate_up.dtype}, down {down.dtype}"
    if gate_up.stride(-1) != 1 or down.stride(-1) != 1:
        return "the last dim of a weight is strided"
    return needs_triton(x, weights, ids, gate_up, down)


def run_triton(
    x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, activation: str = "silu"
) -> Tensor:
    from graft.ops.moe_experts.triton import moe_experts_triton

    return moe_experts_triton(x, weights, ids, gate_up, down, activation)


define(
    OpSpec(
        name="moe_experts",
        schema='(Tensor x, Tensor weights, Tensor ids, Tensor gate_up, Tensor down, str activation="silu") -> Tensor',
        reference=moe_experts,
        fake=fake,
        kernels=(
            Kernel("aten", "existing_kernel", run_aten, aten_supports),
            Kernel("grouped_mm", "existing_kernel", run_grouped_mm, grouped_mm_supports),
            Kernel("triton", "triton", run_triton, triton_supports),
        ),
    )
)
