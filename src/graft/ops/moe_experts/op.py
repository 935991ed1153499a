"""graft::moe_experts(x, weights, ids, gate_up, down, activation, biases, interleaved, weigh_input)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from graft.ops.call import Call
from graft.ops.half_precision import widen_problem
from graft.ops.linear.reference import linear_float32
from graft.ops.moe_experts.reference import gated, moe_experts, sorted_experts, weighted_sum
from graft.ops.spec import Kernel, OpSpec, Pick, define, native, needs_triton
from graft.weights.packing import PACKED
from graft.weights.tiles import tiles_problem

NATIVE = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")  # of the native kernel
FEW_TOKENS = 64
QUANTIZED = (torch.int8, torch.float8_e4m3fn, PACKED)
PACKED_EXPERTS = "the experts are packed"


def fake(
    x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, activation: str = "silu",
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, interleaved: bool = False,
    weigh_input: bool = False, gate_up_scale: Tensor | None = None, down_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape)


def packed(call: Call) -> bool:
    return call.gate_up_scale is not None


def aten_problem(call: Call) -> str | None:
    x = call.x
    if packed(call):
        return PACKED_EXPERTS
    return None if x.device.type == "cpu" else f"it asks for the size of each group, which stalls {x.device}"


def run_aten(
    x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, activation: str = "silu",
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, interleaved: bool = False,
    weigh_input: bool = False, *_: None,
) -> Tensor:  # fmt: skip
    """Matmuls expert by expert. One token needs no sorting, which halves the time of small experts."""
    if x.shape[0] != 1:
        more = (gate_up_bias, down_bias, interleaved, weigh_input)
        return moe_experts(x, weights, ids, gate_up, down, activation, *more)
    matmul = linear_float32 if widen_problem(x, gate_up, down) is None else F.linear
    rows = []
    for slot, expert in enumerate(ids.reshape(-1).tolist()):
        row = (x * weights[:, slot]).to(x.dtype) if weigh_input else x
        hidden = matmul(row, gate_up[expert])  # [1, 2f]
        hidden = hidden if gate_up_bias is None else hidden + gate_up_bias[expert]
        result = matmul(gated(hidden, activation, interleaved), down[expert])
        rows.append(result if down_bias is None else result + down_bias[expert])
    return weighted_sum(torch.cat(rows), torch.ones_like(weights) if weigh_input else weights, x.dtype)


def grouped_mm_problem(call: Call) -> str | None:
    x, gate_up, down = call.x, call.gate_up, call.down
    if packed(call):
        return PACKED_EXPERTS
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
    weigh_input: bool = False, *_: None,
) -> Tensor:  # fmt: skip
    def multiply(rows: Tensor, ends: Tensor, weight: Tensor) -> Tensor:
        return F.grouped_mm(rows, weight.transpose(-2, -1), offs=ends.to(torch.int32))

    up, back = (partial(multiply, weight=weight) for weight in (gate_up, down))
    more = (gate_up_bias, down_bias, interleaved, weigh_input)
    return sorted_experts(x, weights, ids, gate_up.shape[0], activation, *more, up, back)


def triton_problem(call: Call) -> str | None:
    x, gate_up, down = call.x, call.gate_up, call.down
    if packed(call):
        return packed_problem(call) or needs_triton(x, call.weights, call.ids, gate_up, down)
    if not x.dtype == gate_up.dtype == down.dtype:
        return f"x is {x.dtype}, gate_up {gate_up.dtype}, down {down.dtype}"
    return needs_triton(x, call.weights, call.ids, gate_up, down)


def packed_problem(call: Call) -> str | None:
    """Why no Triton kernel takes experts that are packed so, or None."""
    x, kinds = call.x, (call.gate_up.dtype, call.down.dtype)
    if kinds[0] not in QUANTIZED or kinds[1] is not kinds[0]:
        return f"the experts are {' and '.join(sorted(set(map(str, kinds))))}, packed for another backend"
    if call.interleaved:
        return "gate and up of packed experts are halves, and here they take turns"
    return f"x is {x.dtype}" if x.dtype is torch.float64 else None


def gemv_problem(call: Call) -> str | None:
    for name, weight in (("gate_up", call.gate_up), ("down", call.down)):
        if 1 not in weight.stride()[1:]:
            return f"{name} lies neither as [e, out, in] nor as [e, in, out]"
    return triton_problem(call)


def many_tokens(call: Call) -> str | None:
    """Each token reads its experts by itself. Up to half as many pairs as experts, an even router sends three of four
    pairs to an expert of their own."""
    n, k = call.ids.shape
    most = max(k, call.down.shape[0] // 2)
    return None if n * k <= most else f"{n} tokens with {k} experts each would read some experts several times"


def run_gemv(*args: Any) -> Tensor:
    from graft.ops.moe_experts.gemv import moe_experts_gemv

    return moe_experts_gemv(*args)


def native_problem(call: Call) -> str | None:
    kind = call.down.dtype
    if packed(call):
        return native_packed_problem(call)
    if kind not in NATIVE or call.gate_up.dtype is not kind:
        return f"the experts are {kind}"
    options = ("gate_up_bias", "down_bias", "interleaved", "weigh_input")
    beyond = [name for name in options if getattr(call, name) is not None and getattr(call, name) is not False]
    if beyond or call.activation not in ACTIVATIONS:
        return f"experts with {', '.join(beyond) or call.activation}"
    return None


def native_packed_problem(call: Call) -> str | None:
    problem = tiles_problem(call.gate_up) or tiles_problem(call.down)
    if problem is None and call.interleaved:
        return "gate and up of packed experts are halves, and here they take turns"
    if problem is None and call.activation not in (*ACTIVATIONS, "clamped_swiglu"):
        return f"experts with {call.activation}"
    return problem


def run_triton(*args: Any) -> Tensor:
    from graft.ops.moe_experts.triton import moe_experts_triton

    return moe_experts_triton(*args)


def measured(call: Call) -> list[Pick]:
    """H200, us of a layer in a CUDA graph by gemv, triton, grouped_mm (benchmarks/experts.py): Qwen3-30B-A3B, 1 token
    28, 54, 90; 8 tokens 143, 162, 256; 64 tokens -, 334, 492. Mixtral 8x7B, 1 token 174, 241, 340; 64 -, 726, 1,081.
    gpt-oss, whose weights lie as [e, in, out], 1 token 197, 145, -. More tokens were not measured, nor were packed
    experts: they take gemv where it takes them, as floats that lie by rows do."""
    if packed(call):
        return [Pick("gemv"), Pick("triton")]
    if call.x.device.type != "cuda" or call.ids.shape[0] > FEW_TOKENS:
        return []
    by_rows = call.gate_up.stride(-1) == call.down.stride(-1) == 1
    return [Pick("gemv"), Pick("triton")] if by_rows else [Pick("triton")]


define(
    OpSpec(
        name="moe_experts",
        schema='(Tensor x, Tensor weights, Tensor ids, Tensor gate_up, Tensor down, str activation="silu",'
        " Tensor? gate_up_bias=None, Tensor? down_bias=None, bool interleaved=False, bool weigh_input=False,"
        " Tensor? gate_up_scale=None, Tensor? down_scale=None) -> Tensor",
        reference=moe_experts,
        fake=fake,
        kernels=(
            Kernel("aten", "existing", aten_problem, run_aten),
            Kernel("grouped_mm", "existing", grouped_mm_problem, run_grouped_mm),
            Kernel("triton", "triton", triton_problem, run_triton),
            Kernel("gemv", "triton", gemv_problem, run_gemv, varies=many_tokens),
            native(native_problem),
        ),
        measured=measured,
    )
)
