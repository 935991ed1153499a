"""graft::moe_experts(x, weights, ids, gate_up, down, activation, biases, interleaved, weigh_input)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from graft.ops.linear.reference import linear_float32
from graft.ops.moe_experts.reference import gated, moe_experts, sorted_experts, weighted_sum
from graft.ops.narrow import widen_problem
from graft.ops.spec import Kernel, OpSpec, define, needs_triton


def fake(
    x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, activation: str = "silu",
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, interleaved: bool = False,
    weigh_input: bool = False,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape)


def aten_supports(x: Tensor, *_: object) -> str | None:
    return None if x.device.type == "cpu" else f"it asks for the size of each group, which stalls {x.device}"


def run_aten(
    x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, activation: str = "silu",
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, interleaved: bool = False,
    weigh_input: bool = False,
) -> Tensor:  # fmt: skip
    """Matrix products expert by expert. One token needs no sorting, which halves the time of small experts."""
    if x.shape[0] != 1:
        more = (gate_up_bias, down_bias, interleaved, weigh_input)
        return moe_experts(x, weights, ids, gate_up, down, activation, *more)
    product = linear_float32 if widen_problem(x, gate_up, down) is None else F.linear
    rows = []
    for slot, expert in enumerate(ids.reshape(-1).tolist()):
        row = (x * weights[:, slot]).to(x.dtype) if weigh_input else x
        hidden = product(row, gate_up[expert])  # [1, 2f]
        hidden = hidden if gate_up_bias is None else hidden + gate_up_bias[expert]
        result = product(gated(hidden, activation, interleaved), down[expert])
        rows.append(result if down_bias is None else result + down_bias[expert])
    return weighted_sum(torch.cat(rows), torch.ones_like(weights) if weigh_input else weights, x.dtype)


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
    if gate_up.stride(-1) != 1 or down.stride(-1) != 1:
        return "torch's grouped_mm is used for weights that lie as [e, out, in]"
    return None


def run_grouped_mm(
    x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, activation: str = "silu",
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, interleaved: bool = False,
    weigh_input: bool = False,
) -> Tensor:  # fmt: skip
    def product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return F.grouped_mm(rows, weight, offs=ends.to(torch.int32))

    more = (gate_up_bias, down_bias, interleaved, weigh_input)
    return sorted_experts(x, weights, ids, gate_up, down, activation, *more, product)


def triton_supports(x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, *_: object) -> str | None:
    if not x.dtype == gate_up.dtype == down.dtype:
        return f"x is {x.dtype}, gate_up {gate_up.dtype}, down {down.dtype}"
    return needs_triton(x, weights, ids, gate_up, down)


def run_triton(
    x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, activation: str = "silu",
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, interleaved: bool = False,
    weigh_input: bool = False,
) -> Tensor:  # fmt: skip
    from graft.ops.moe_experts.triton import moe_experts_triton

    more = (gate_up_bias, down_bias, interleaved, weigh_input)
    return moe_experts_triton(x, weights, ids, gate_up, down, activation, *more)


define(
    OpSpec(
        name="moe_experts",
        schema='(Tensor x, Tensor weights, Tensor ids, Tensor gate_up, Tensor down, str activation="silu",'
        " Tensor? gate_up_bias=None, Tensor? down_bias=None, bool interleaved=False, bool weigh_input=False)"
        " -> Tensor",
        reference=moe_experts,
        fake=fake,
        kernels=(
            Kernel("aten", "existing_kernel", run_aten, aten_supports),
            Kernel("grouped_mm", "existing_kernel", run_grouped_mm, grouped_mm_supports),
            Kernel("triton", "triton", run_triton, triton_supports),
        ),
    )
)
