"""How hard a candidate is to write, and how easily its numbers go wrong."""

from __future__ import annotations

from typing import Literal

from graft.ir.nodes import tensor_val
from graft.workbench.discover.calls import REDUCTIONS, SOFTMAX, is_attention, is_free, is_matmul, is_norm
from graft.workbench.discover.regions import CandidateRegion

NumericRisk = Literal["low", "medium", "high"]
RISKS: tuple[NumericRisk, ...] = ("low", "medium", "high")
LOOP, FOREIGN = 2, 10  # what a reduction adds, and what is not written from a pattern


def complexity(piece: CandidateRegion) -> int:
    """What one kernel would have to do: its calls, its loops over a row, its inputs and results, and ten for each
    GEMM or attention in it."""
    working = [node for node in piece.nodes if not is_free(node)]
    loops = sum(node.target in REDUCTIONS or node.target in SOFTMAX or is_norm(node) for node in working)
    foreign = sum(is_matmul(node) or is_attention(node) for node in working)
    return len(working) + LOOP * loops + FOREIGN * foreign + len(piece.inputs()) + len(piece.outputs())


def numeric_risk(piece: CandidateRegion) -> NumericRisk:
    """Of two: it sums (a reduction, a norm, a softmax, a GEMM) in a dtype of 16 bits, and it casts between dtypes,
    where a kernel must round as the model does. None is low, one medium, both high."""
    working = [node for node in piece.nodes if not is_free(node)]
    tensors = [value for node in (*piece.inputs(), *working) if (value := tensor_val(node)) is not None]
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    sums = any(is_norm(node) or node.target in SOFTMAX or is_matmul(node) or is_attention(node) for node in working)
    narrow = any(dtype.itemsize < 4 for dtype in dtypes)
    return RISKS[(sums and narrow) + (len(dtypes) > 1)]
