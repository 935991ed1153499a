"""The kit for testing transforms: a pytest plugin (`graft.testing.plugin`) and plain helpers.

    from graft.testing import assert_fuses, assert_not_fuses

Each helper raises one AssertionError that says what was expected, what was found, how near it came, and what to do.
Loaded on first use: a pytest run that has graft installed and does not use it imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graft.testing.eager_compiled import assert_compiled_like_eager
    from graft.testing.float64 import assert_near_float64
    from graft.testing.fusion import Trial, assert_fuses, assert_not_fuses, try_transform
    from graft.testing.generated import Generated, generated_kernels
    from graft.testing.metadata import assert_metadata_preserved
    from graft.testing.negatives import assert_refused_or_harmless
    from graft.testing.numbers import assert_matches_eager, assert_same_numbers, matrix
    from graft.testing.op_calls import assert_op_safe
    from graft.testing.post_grad import PostGrad, post_grad_graph
    from graft.testing.recompiles import assert_no_recompiles
    from graft.testing.round_trip import RoundTrip, cache_round_trip
    from graft.testing.stages import (
        assert_cudagraphed,
        assert_fused_together,
        assert_kernel_count,
        assert_no_copies,
        assert_no_graph_breaks,
        autotune_choices,
    )

_HOMES = {
    "Trial": "fusion",
    "assert_fuses": "fusion",
    "assert_not_fuses": "fusion",
    "try_transform": "fusion",
    "Generated": "generated",
    "generated_kernels": "generated",
    "assert_metadata_preserved": "metadata",
    "assert_refused_or_harmless": "negatives",
    "assert_matches_eager": "numbers",
    "assert_same_numbers": "numbers",
    "matrix": "numbers",
    "assert_near_float64": "float64",
    "assert_op_safe": "op_calls",
    "PostGrad": "post_grad",
    "post_grad_graph": "post_grad",
    "assert_no_recompiles": "recompiles",
    "RoundTrip": "round_trip",
    "cache_round_trip": "round_trip",
    "assert_compiled_like_eager": "eager_compiled",
    "assert_cudagraphed": "stages",
    "assert_fused_together": "stages",
    "assert_kernel_count": "stages",
    "assert_no_copies": "stages",
    "assert_no_graph_breaks": "stages",
    "autotune_choices": "stages",
}
__all__ = [
    "Generated",
    "PostGrad",
    "RoundTrip",
    "Trial",
    "assert_compiled_like_eager",
    "assert_cudagraphed",
    "assert_fused_together",
    "assert_fuses",
    "assert_kernel_count",
    "assert_matches_eager",
    "assert_metadata_preserved",
    "assert_near_float64",
    "assert_no_copies",
    "assert_no_graph_breaks",
    "assert_no_recompiles",
    "assert_not_fuses",
    "assert_op_safe",
    "assert_refused_or_harmless",
    "assert_same_numbers",
    "autotune_choices",
    "cache_round_trip",
    "generated_kernels",
    "matrix",
    "post_grad_graph",
    "try_transform",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'graft.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"graft.testing.{_HOMES[name]}"), name)
