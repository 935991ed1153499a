"""A new op's Triton kernel by itself: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from graft.ir.io.symbols import fresh_mode
from graft.ops import OPS
from graft.ops.spec import Kernel
from graft.testing.interpreter import round_to_nearest
from graft.workbench.autofuse.alone import ComparedCalls
from graft.workbench.autofuse.cases import (
    BATCHES,
    KernelCase,
    broadcast_cases,
    dtype_cases,
    far_case,
    inputs,
    layout_cases,
    plain_cases,
)


def triton_kernel_problem(op: str, shapes: Mapping[str, str], device: str) -> tuple[str, int]:
    """What is wrong with the Triton kernel of graft::`op`, '' for nothing; and how many calls were compared. A call
    that the op's table refuses needs no comparison, unless all inputs have the dtypes of the pattern."""
    round_to_nearest()
    spec = OPS[op]
    kernel = spec.by_name["triton"]
    compared = ComparedCalls(spec.reference, torch.device(device))
    for case, must in triton_cases(shapes, compared.device):
        refused = refusal(op, kernel, case)
        if refused and must:
            return f"its own table refuses it: {refused} ({case.name})", compared.calls
        if refused or not compared.applies(case):
            continue
        problem = compared.problem(lambda given: kernel.run(*given), case)
        if problem:
            return problem, compared.calls
    return compared.unseen() or empty_problem(op, kernel, shapes, device), compared.calls


def triton_cases(shapes: Mapping[str, str], device: torch.device) -> Iterator[tuple[KernelCase, bool]]:
    """And whether the kernel must take it."""
    for case in plain_cases(shapes, BATCHES):
        yield case, True
    for case in layout_cases(shapes):
        yield case, True
    for number, case in enumerate(dtype_cases(shapes)):
        yield case, number < 4  # all inputs in one dtype
    for case in broadcast_cases(shapes):
        yield case, False
    for index in range(len(shapes)):
        case = far_case(shapes, index, device)
        if case is not None:
            yield case, False


def refusal(op: str, kernel: Kernel, case: KernelCase) -> str | None:
    """What the table says of such a call on a GPU, which need not be here."""
    with fresh_mode():
        fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in case.tensors]
        return kernel.problem(OPS[op].call(*fakes))


def empty_problem(op: str, kernel: Kernel, shapes: Mapping[str, str], device: str) -> str:
    """No tokens at all."""
    given = [tensor.to(device) for tensor in inputs(shapes, 16, 1.0, (1, 0))]
    if all(tensor.numel() for tensor in given):
        return ""
    made, wanted = kernel.run(*given), OPS[op].reference(*given)
    same = [a.shape == b.shape for a, b in zip(*map(tensors_of, (made, wanted)), strict=True)]
    return "" if all(same) else "without tokens its results have other shapes"


def tensors_of(value: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return list(value) if isinstance(value, tuple) else [value]
