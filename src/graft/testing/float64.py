"""Numbers beside float64, as the numeric check of matches judges them (passes/numeric/compare.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graft.ir.nodes import leaves
from graft.ops.cases import UNIT, tolerance
from graft.passes.numeric.compare import Difference, difference, largest
from graft.passes.numeric.execution import Execution
from graft.testing.failure import failure


def assert_near_float64(got: Any, exact: Any, *, like: Any = None, reduction: int = 1, wrong: Any = None) -> None:
    """Results near those of the same computation in float64, relative to the largest value.

    like: the plain computation in the dtype of `got`, which may be at most three times as far off as that is, and no
    factor of the mean; without it, four roundings of the dtype are allowed. reduction: how many values the longest
    sum has. wrong: results of a variant that is a little wrong; the same comparison must reject them.
    """
    __tracebackhide__ = True
    found = worst(got, exact, like, reduction)
    if found.wrong or found.unclear:
        raise failure(
            f"at most {found.limit:.1e} of the largest value off float64",
            found.unclear or f"{found.what} by {found.error:.1e}",
            advice="correct the kernel; if the plain computation is as far off, give it as `like`",
        )
    if wrong is not None and not (other := worst(wrong, exact, like, reduction)).wrong:
        raise failure(
            f"the wrong variant is rejected at {other.limit:.1e} of the largest value",
            f"it passes, being {other.what} by {other.error:.1e}",
            advice="use larger or more inputs, or make the variant more wrong",
        )


def worst(got: Any, exact: Any, like: Any, reduction: int) -> Difference:
    """Of several results the one that is furthest off."""
    ours, right = (tensors_in(values) for values in (got, exact))
    plain = [None] * len(ours) if like is None else tensors_in(like)
    if not len(ours) == len(right) == len(plain):
        return Difference(float("inf"), 0.0, what=f"{len(ours)} results and not {len(right)}, off")
    found = [one_result(*three, reduction) for three in zip(ours, right, plain, strict=True)]
    return max(found, key=lambda one: (one.wrong, bool(one.unclear), one.error / one.limit if one.limit else 0.0))


def one_result(got: Tensor, exact: Tensor, like: Tensor | None, reduction: int) -> Difference:
    execution = Execution()
    execution.longest, execution.coarsest = reduction, got.dtype if got.dtype in UNIT else torch.float32
    if like is not None or got.shape != exact.shape or not got.is_floating_point():
        return difference(exact, exact.to(got.dtype) if like is None else like, got, execution)
    error, scale = largest(got.double() - exact.double()), largest(exact.double()) or 1.0
    return Difference(error / scale, tolerance(got.dtype, reduction))


def tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(pytree.tree_leaves(values)) if isinstance(leaf, Tensor)]
