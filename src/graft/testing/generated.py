"""The kernels that Inductor writes for a function, and the ops it calls beside them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from graft.backends.inductor import generated_code, reset_compiler


@dataclass(frozen=True)
class GeneratedKernel:
    """One kernel: `cpp_fused_add_0` in C++, or `triton_poi_fused_add_0` in Triton's language."""

    name: str
    language: str
    source: str = field(repr=False)


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
    trees = [ast.parse(text) for text in code]
    kernels = tuple(kernel for tree in trees for kernel in read_kernels(tree))
    return Generated(result, kernels, tuple(call for tree in trees for call in read_calls(tree)), tuple(code))


def read_kernels(tree: ast.AST) -> Iterator[GeneratedKernel]:
    """`name = async_compile.LANGUAGE(…, '''source''', …)`; the source is the longest text among the arguments."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        called, target = dotted(node.value.func), node.targets[0]
        texts = [a.value for a in node.value.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        if called.startswith("async_compile.") and texts and isinstance(target, ast.Name):
            language = called.removeprefix("async_compile.").removesuffix("_pybinding")
            yield GeneratedKernel(target.id, language, max(texts, key=len))


def read_calls(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            if name.startswith(("torch.ops.", "extern_kernels.", "aten.")):
                yield name


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""
