"""graft::all_reduce_add_norm(x, residual, weight, world, eps, …) -> (normalized, sum): the exchange behind a layer
that is split by rows, and what every rank then does with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graft.ops.add_rms_norm.op import fake as fake_add_norm
from graft.ops.all_reduce.op import group_problem
from graft.ops.all_reduce.reference import all_reduce
from graft.ops.all_reduce_add_norm.reference import all_reduce_add_norm
from graft.ops.call import Call
from graft.ops.peers import peer_problem
from graft.ops.spec import Kernel, OpSpec, define, needs_triton, vector_problem


def fake(x: Tensor, residual: Tensor, weight: Tensor, world: int, eps: float, *how: Any) -> tuple[Tensor, Tensor]:
    return fake_add_norm(x, residual, weight, eps, *how)


def run_group(x: Tensor, residual: Tensor, weight: Tensor, world: int, *norm: Any) -> tuple[Tensor, Tensor]:
    """The group's own sum, and the kernel that graft::add_rms_norm has for it."""
    return torch.ops.graft.add_rms_norm(all_reduce(x, world), residual, weight, *norm)


def triton_problem(call: Call) -> str | None:
    x, residual, weight = call.x, call.residual, call.weight
    if not x.dtype == residual.dtype == weight.dtype:
        return f"dtypes differ: {x.dtype}, {residual.dtype}, {weight.dtype}"
    if x.shape != residual.shape:
        return f"x is {tuple(x.shape)} and residual is {tuple(residual.shape)}"
    return vector_problem(x.shape[-1], weight) or needs_triton(x, residual, weight) or peer_problem(call.world)


def run_triton(*args: Any) -> tuple[Tensor, Tensor]:
    from graft.ops.all_reduce_add_norm.triton import all_reduce_add_norm_triton

    return all_reduce_add_norm_triton(*args)


define(
    OpSpec(
        name="all_reduce_add_norm",
        schema="(Tensor x, Tensor residual, Tensor weight, int world, float eps, float offset=0.0,"
        " bool cast_last=False, bool wide=False) -> (Tensor, Tensor)",
        reference=all_reduce_add_norm,
        fake=fake,
        # the second by its name alone: it was not timed between two GPUs
        kernels=(
            Kernel("torch.distributed", "existing", group_problem, run_group),
            Kernel("triton", "triton", triton_problem, run_triton),
        ),
    )
)
