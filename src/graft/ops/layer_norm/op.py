"""graft::layer_norm(x, weight, bias, eps, form, upcast)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from graft.ops.layer_norm.reference import layer_norm
from graft.ops.spec import Kernel, OpSpec, define, needs_triton


def fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, form: str = "fused", upcast: bool = False
) -> Tensor:
    return x.new_empty(x.shape)


def same_dtype(*tensors: Tensor | None) -> str | None:
    dtypes = {str(t.dtype) for t in tensors if t is not None}
    return f"dtypes differ: {', '.join(sorted(dtypes))}" if len(dtypes) > 1 else None


def rounds_once(x: Tensor, form: str, upcast: bool) -> str | None:
    """Kernels compute in float32 and round at the end, which some spellings do not."""
    if form == "fused" or upcast or x.dtype == torch.float32:
        return None
    return f"the model spells the norm out in {x.dtype}, which rounds after every step"


def aten_supports(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, form: str = "fused", upcast: bool = False
) -> str | None:
    if form == "fused":
        return None
    if x.device.type == "cpu":
        return "torch.layer_norm sums in another order than the model spells; on a CPU it saves no launches"
    return rounds_once(x, form, upcast) or same_dtype(x, weight, bias)


def triton_supports(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, form: str = "fused", upcast: bool = False
) -> str | None:
    return rounds_once(x, form, upcast) or same_dtype(x, weight, bias) or needs_triton(x, weight, bias)


def run_aten(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, form: str = "fused", upcast: bool = False
) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def run_triton(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, form: str = "fused", upcast: bool = False
) -> Tensor:
    from graft.ops.layer_norm.triton import layer_norm_triton

    return layer_norm_triton(x, weight, bias, eps)


define(
    OpSpec(
        name="layer_norm",
        schema='(Tensor x, Tensor? weight, Tensor? bias, float eps, str form="fused", bool upcast=False) -> Tensor',
        reference=layer_norm,
        fake=fake,
        kernels=(
            Kernel("aten", "existing_kernel", run_aten, aten_supports),
            Kernel("triton", "triton", run_triton, triton_supports),
        ),
    )
)
