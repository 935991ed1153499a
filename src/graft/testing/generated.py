"""The kernels that Inductor writes for a function, and the ops it calls beside them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from graft.backends.inductor import generated_code, reset_compiler
from graft.stages.kernels import GeneratedKernel, read_calls, read_kernels
from graft.testing.failure import failure
from graft.testing.fusion import name_of


@dataclass(frozen=True)
class Generated:
    """kernels: written by Inductor. calls: what its code calls beside them (`torch.ops.graft.swiglu.default`,
    `extern_kernels.mm`), as often as it does. code: the whole of it, one text a graph."""

    result: Any
    kernels: tuple[GeneratedKernel, ...]
    calls: tuple[str, ...]
    code: tuple[str, ...] = field(repr=False)


def generated_kernels(
    function: Callable[..., Any],
    *args: Any,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    **kwargs: Any,
) -> Generated:
    """Compiles `function` with Inductor, caches off, and takes its code apart. options: as for torch.compile."""
    try:
        compiled = torch.compile(function, dynamic=dynamic, options=dict(options) if options else None)
        with torch.no_grad():
            result, code = generated_code(compiled, *args, **kwargs)
    finally:
        reset_compiler()
    if not code:
        raise failure(
            f"{name_of(function)} is compiled", "Dynamo made no graph of it, so there is no code to look at",
            advice="graft stages ask breaks says why",
        )  # fmt: skip
    trees = [ast.parse(text) for text in code]
    kernels = tuple(kernel for tree in trees for kernel in read_kernels(tree))
    return Generated(result, kernels, tuple(call for tree in trees for call in read_calls(tree)), tuple(code))
