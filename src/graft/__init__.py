"""graft: compile an unmodified decoder into a fast, inspectable engine; write, check and ship graph fusions."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graft.api.compile import compile
    from graft.api.compiled import CompiledModule
    from graft.api.functionalization import fix_functionalization, functionalization_reports
    from graft.api.inductor_passes import inductor_reports, passes_for_inductor
    from graft.api.load import load
    from graft.api.saved_function import portable_guards
    from graft.api.torch_compile import Backend, backend_reports
    from graft.backends.inductor_caches import load_cache_artifacts, save_cache_artifacts
    from graft.base.errors import GraftError, UsageError
    from graft.engine.core import EmbeddingOutput, Output
    from graft.engine.llm import LLM
    from graft.engine.params import SamplingParams
    from graft.ir.patterns.match import Match, Refused
    from graft.memory.lifting import Binding, Lifted, inline_buffers, lift_buffers
    from graft.ops.call import Call
    from graft.ops.spec import Kernel, OpSpec, needs_triton
    from graft.ops.spec import define as define_op
    from graft.ops.spec import native as native_kernel
    from graft.passes.base import BaseTransform, Context, Outcome, Stage, TransformConfig
    from graft.passes.foreign import as_transform
    from graft.passes.patterns import PatternTransform, Rewrite
    from graft.passes.registry import TransformRegistry
    from graft.passes.report import Report
    from graft.passes.rewriter import Rewriter
    from graft.workbench.diff import diff_graphs
    from graft.workbench.runs import open_run
    from graft.workbench.stored import load_dump

__version__ = "0.1.0"

# Loaded on first use: `import graft` must not import torch.
_HOMES = {
    "LLM": "graft.engine.llm",
    "SamplingParams": "graft.engine.params",
    "Output": "graft.engine.core",
    "EmbeddingOutput": "graft.engine.core",
    "compile": "graft.api.compile",
    "CompiledModule": "graft.api.compiled",
    "load": "graft.api.load",
    "Backend": "graft.api.torch_compile",
    "backend_reports": "graft.api.torch_compile",
    "portable_guards": "graft.api.saved_function",
    "passes_for_inductor": "graft.api.inductor_passes",
    "inductor_reports": "graft.api.inductor_passes",
    "fix_functionalization": "graft.api.functionalization",
    "functionalization_reports": "graft.api.functionalization",
    "GraftError": "graft.base.errors",
    "UsageError": "graft.base.errors",
    "as_transform": "graft.passes.foreign",
    "BaseTransform": "graft.passes.base",
    "Context": "graft.passes.base",
    "Outcome": "graft.passes.base",
    "Stage": "graft.passes.base",
    "TransformConfig": "graft.passes.base",
    "OpSpec": "graft.ops.spec",
    "Kernel": "graft.ops.spec",
    "Call": "graft.ops.call",
    "define_op": "graft.ops.spec:define",
    "native_kernel": "graft.ops.spec:native",
    "needs_triton": "graft.ops.spec",
    "Rewriter": "graft.passes.rewriter",
    "PatternTransform": "graft.passes.patterns",
    "Rewrite": "graft.passes.patterns",
    "Match": "graft.ir.patterns.match",
    "Refused": "graft.ir.patterns.match",
    "TransformRegistry": "graft.passes.registry",
    "Report": "graft.passes.report",
    "lift_buffers": "graft.memory.lifting",
    "inline_buffers": "graft.memory.lifting",
    "Lifted": "graft.memory.lifting",
    "Binding": "graft.memory.lifting",
    "load_cache_artifacts": "graft.backends.inductor_caches",
    "save_cache_artifacts": "graft.backends.inductor_caches",
    "load_dump": "graft.workbench.stored",
    "diff_graphs": "graft.workbench.diff",
    "open_run": "graft.workbench.runs",
}
__all__ = [
    "LLM",
    "Backend",
    "BaseTransform",
    "Binding",
    "Call",
    "CompiledModule",
    "Context",
    "EmbeddingOutput",
    "GraftError",
    "Kernel",
    "Lifted",
    "Match",
    "OpSpec",
    "Outcome",
    "Output",
    "PatternTransform",
    "Refused",
    "Report",
    "Rewrite",
    "Rewriter",
    "SamplingParams",
    "Stage",
    "TransformConfig",
    "TransformRegistry",
    "UsageError",
    "as_transform",
    "backend_reports",
    "compile",
    "define_op",
    "diff_graphs",
    "fix_functionalization",
    "functionalization_reports",
    "inductor_reports",
    "inline_buffers",
    "lift_buffers",
    "load",
    "load_cache_artifacts",
    "load_dump",
    "native_kernel",
    "needs_triton",
    "open_run",
    "passes_for_inductor",
    "portable_guards",
    "save_cache_artifacts",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'graft' has no attribute {name!r}")
    module, _, own = _HOMES[name].partition(":")
    return getattr(importlib.import_module(module), own or name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
