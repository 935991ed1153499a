"""Kernels that compute a function: graft's ops, ATen's, Inductor's patterns, and those of installed packages."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from graft.base.errors import PatternError
from graft.workbench.discover.find import every_kernel
from graft.workbench.discover.known import look_by_value
from graft.workbench.discover.lookup import Existing, look_in_graft
from graft.workbench.scaffold.candidate import SIZES, Seed, traced
from graft.workbench.search.pattern import SearchPattern


def kernels_for(pattern: SearchPattern) -> tuple[tuple[Existing, ...], str]:
    """Those that compute all of it, and why some could not be compared, if so."""
    assert pattern.function is not None
    gm = graph_of(pattern)
    own = look_in_graft(gm)
    others, unseen = look_by_value(gm, every_kernel())
    return (*(own.found if own.whole else ()), *others), unseen.reason


def graph_of(pattern: SearchPattern) -> GraphModule:
    assert pattern.function is not None
    seed = Seed("", "", pattern.text, 0, "", pattern.shapes, ())
    literals = {
        name: 0.25 for name, kind in pattern.function.__annotations__.items() if kind in (float, "float")
    }  # as graft.testing does
    try:
        return traced(seed, lambda *tensors: pattern.function(*tensors, **literals), SIZES[0])  # pyrefly: ignore
    except (RuntimeError, TypeError, ValueError, torch.jit.Error) as error:
        raise PatternError(
            f'{pattern.text} cannot be traced: {str(error).splitlines()[0]}; --shapes "x: b s d, w: n d" names sizes'
        ) from error
