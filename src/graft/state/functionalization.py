"""Mutating calls back into Inductor's functional graph, where that is proven to be right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph

from graft.state.report import FunctionalizationReport

SOURCES = ("functionalization.py", "report.py")

# At module level: AOTInductor deep-copies pass objects, so a list on the object would stay empty.
_REPORTS: list[FunctionalizationReport] = []


def fix_functionalization(graph: Graph) -> FunctionalizationReport:  # noqa: ARG001
    return FunctionalizationReport()


class FixFunctionalization(CustomGraphPass):
    """The fix as an Inductor pass. One object, because torch 2.11 takes no list."""

    def __call__(self, graph: Graph) -> None:
        _REPORTS.append(fix_functionalization(graph))

    def uuid(self) -> bytes:
        """Inductor keys its caches by this: another source or another torch compiles anew."""
        folder = Path(__file__).parent
        return get_hash_for_files(tuple(str(folder / name) for name in SOURCES), torch.__version__)


def inductor_options() -> dict[str, Any]:
    """What `torch.compile(fn, options=…)` needs for the fix."""
    return {"post_grad_custom_post_pass": FixFunctionalization()}


def reports() -> list[FunctionalizationReport]:
    """The reports of all graphs compiled since the last call. A hit in Inductor's cache runs no pass and adds none."""
    drained = list(_REPORTS)
    _REPORTS.clear()
    return drained
