"""graft: compile an unmodified decoder into a fast, inspectable engine; write, prove and ship graph fusions."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graft.graph.match import Match, Refused
    from graft.runtime.artifacts import load
    from graft.runtime.compile import CompiledModule, compile
    from graft.runtime.core import Output
    from graft.runtime.inductor_passes import inductor_reports, passes_for_inductor
    from graft.runtime.llm import LLM
    from graft.runtime.params import SamplingParams
    from graft.runtime.torch_compile import Backend, backend_reports
    from graft.state.lifting import Binding, Lifted, inline_buffers, lift_buffers
    from graft.transforms.base import BaseTransform, Context, Outcome, TransformConfig
    from graft.transforms.patterns import PatternTransform, Rewrite
    from graft.transforms.registry import TransformRegistry
    from graft.transforms.report import Report
    from graft.transforms.rewriter import Rewriter
    from graft.workbench.diff import diff_graphs
    from graft.workbench.runs import open_run
    from graft.workbench.stored import load_dump

__version__ = "0.1.0"

# Loaded on first use: `import graft` must not import torch.
_HOMES = {
    "LLM": "graft.runtime.llm",
    "SamplingParams": "graft.runtime.params",
    "Output": "graft.runtime.core",
    "compile": "graft.runtime.compile",
    "CompiledModule": "graft.runtime.compile",
    "load": "graft.runtime.artifacts",
    "Backend": "graft.runtime.torch_compile",
    "backend_reports": "graft.runtime.torch_compile",
    "passes_for_inductor": "graft.runtime.inductor_passes",
    "inductor_reports": "graft.runtime.inductor_passes",
    "BaseTransform": "graft.transforms.base",
    "Context": "graft.transforms.base",
    "Outcome": "graft.transforms.base",
    "TransformConfig": "graft.transforms.base",
    "Rewriter": "graft.transforms.rewriter",
    "PatternTransform": "graft.transforms.patterns",
    "Rewrite": "graft.transforms.patterns",
    "Match": "graft.graph.match",
    "Refused": "graft.graph.match",
    "TransformRegistry": "graft.transforms.registry",
    "Report": "graft.transforms.report",
    "lift_buffers": "graft.state.lifting",
    "inline_buffers": "graft.state.lifting",
    "Lifted": "graft.state.lifting",
    "Binding": "graft.state.lifting",
    "load_dump": "graft.workbench.stored",
    "diff_graphs": "graft.workbench.diff",
    "open_run": "graft.workbench.runs",
}
__all__ = [
    "LLM",
    "Backend",
    "BaseTransform",
    "Binding",
    "CompiledModule",
    "Context",
    "Lifted",
    "Match",
    "Outcome",
    "Output",
    "PatternTransform",
    "Refused",
    "Report",
    "Rewrite",
    "Rewriter",
    "SamplingParams",
    "TransformConfig",
    "TransformRegistry",
    "backend_reports",
    "compile",
    "diff_graphs",
    "inductor_reports",
    "inline_buffers",
    "lift_buffers",
    "load",
    "load_dump",
    "open_run",
    "passes_for_inductor",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'graft' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
