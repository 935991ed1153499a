"""What one trial is made of, and the trials of a match: no fault of one size, dtype, layout or range goes unseen.

All combinations would be tens of thousands. Every value and every layout is tried in the graph's own dtype at the
recorded sizes, seven pairs of them in every other dtype, every needed size in every dtype with one layout after
another; the sweep over sizes is in the graph's own dtype. A fault that needs three of them at once may slip through.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle

import torch

from graft.ir.evaluate import INPUT_KINDS
from graft.passes.numeric.layouts import LAYOUTS, RECORDED_LAYOUT
from graft.passes.numeric.sizes import LARGE, RECORDED, Sizes, further_sizes, needed_sizes, sizes_text

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = "activations of a prompt as"  # `… inputs`
ORDINARY = "random"
# in the dtypes that are not the graph's own
ELSEWHERE = (
    *((ORDINARY, RECORDED_LAYOUT), ("moderate", "offset"), ("spread", RECORDED_LAYOUT), ("large", RECORDED_LAYOUT)),
    *(("negative", "transposed"), ("one NaN", RECORDED_LAYOUT)),
    ("small", RECORDED_LAYOUT),  # one percent more of an eps is below the roundings of 16 bits
)


@dataclass(frozen=True)
class NumericTrial:
    """dtype: what takes the place of the piece's own; None where it has none. varied: weights that have one value
    throughout get others."""

    values: str = ORDINARY
    dtype: torch.dtype | None = None
    sizes: Sizes = field(default_factory=dict)
    layout: str = RECORDED_LAYOUT
    varied: bool = False

    @property
    def text(self) -> str:
        """`random inputs (bfloat16, sizes 1 × 5, transposed)`."""
        dtype = [str(self.dtype).removeprefix("torch.")] if self.dtype else []
        layout = [self.layout] if self.layout != RECORDED_LAYOUT else []
        weights = ["other weights"] if self.varied else []
        return f"{self.values} inputs ({', '.join([*dtype, sizes_text(self.sizes), *layout, *weights])})"


def needed_trials(own: torch.dtype | None, upper: Mapping[str, int]) -> Iterator[NumericTrial]:
    """Those that every kind of match goes through, the recorded one first. own: the dtype of the piece."""
    dtypes = dtypes_of(own)
    yield from (NumericTrial(kind, own) for kind in INPUT_KINDS)
    yield from (NumericTrial(dtype=own, layout=layout) for layout in LAYOUTS)
    yield from (NumericTrial(kind, dtype, layout=layout) for dtype in dtypes[1:] for kind, layout in ELSEWHERE)
    layouts = cycle((RECORDED_LAYOUT, *LAYOUTS))
    yield from (
        NumericTrial(dtype=dtype, sizes=sizes, layout=next(layouts))
        for sizes in needed_sizes(upper)
        for dtype in dtypes
        if sizes != RECORDED
    )


def further_trials(own: torch.dtype | None, upper: Mapping[str, int]) -> Iterator[NumericTrial]:
    """As far as they are cheap: the large number of tokens in every dtype, the others in the piece's own."""
    for sizes in further_sizes(upper):
        large = max(sizes.values()) >= LARGE
        yield from (NumericTrial(dtype=dtype, sizes=sizes) for dtype in (dtypes_of(own) if large else (own,)))


def dtypes_of(own: torch.dtype | None) -> Sequence[torch.dtype | None]:
    return (own, *(dtype for dtype in DTYPES if dtype is not own)) if own in DTYPES else (own,)
