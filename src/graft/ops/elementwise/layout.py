"""One loop for tensors of any strides: dims of size 1 fall away, and neighbours that all tensors walk alike merge.

    [2, 5, 64] contiguous and [64]        → sizes (10, 64), strides (64, 1) and (0, 1)
    [2, 5, 64] contiguous, and all alike  → sizes (640,), strides (1,)

After that no size is 0 or 1 (save for a single element), so a compiled kernel is specialized on the pattern of its
dims alone, never on a size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Loop:
    """`shape`: of the results. `sizes`: of the merged loop. `strides`: of every input in it, 0 where broadcast."""

    shape: torch.Size
    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]

    @property
    def pattern(self) -> tuple[tuple[bool, ...], ...]:
        """Which dims every input really walks along."""
        return tuple(tuple(stride != 0 for stride in strides) for strides in self.strides)

    @property
    def reach(self) -> int:
        """The largest offset that any tensor is read or written at."""
        spans = [sum((n - 1) * abs(s) for n, s in zip(self.sizes, strides, strict=True)) for strides in self.strides]
        return max(self.shape.numel() - 1, *spans)


def loop_of(inputs: Sequence[Tensor]) -> Loop:
    """The merged loop over the shape of all inputs together; results count as contiguous tensors of that shape."""
    shape = max((t.shape for t in inputs), key=len)
    if any(t.shape != shape and t.dim() for t in inputs):
        shape = torch.broadcast_shapes(*(t.shape for t in inputs))
    elif shape.numel() > 1 and all(t.is_contiguous() for t in inputs):
        return Loop(shape, (shape.numel(),), tuple((int(t.dim() > 0),) for t in inputs))
    walks = [t.expand(shape).stride() for t in inputs]
    dims = [(n, [walk[i] for walk in walks]) for i, n in enumerate(shape) if n != 1]
    merged: list[tuple[int, list[int]]] = []
    for size, strides in dims:
        # every input walks both dims as one, and so do the results, which are contiguous
        if merged and all(outer == size * inner for outer, inner in zip(merged[-1][1], strides, strict=True)):
            merged[-1] = (merged[-1][0] * size, strides)
        else:
            merged.append((size, strides))
    if not merged and shape:  # one element, but not 0-d, which promotes differently
        merged = [(1, [0] * len(inputs))]
    sizes = tuple(size for size, _ in merged)
    return Loop(shape, sizes, tuple(tuple(strides[i] for _, strides in merged) for i in range(len(inputs))))
