"""Tokens into the line that is due, by one program: no other may read the count after this one has set it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.ops.launch import pdl_supported


@triton.jit(do_not_specialize=["stride_line", "count"])
def deliver_rows_kernel(
    tokens, filled, ring, out, stride_line, count, LINES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    due = tl.load(filled)
    line = due % LINES
    row = tl.arange(0, BLOCK)
    value = tl.load(tokens + row, mask=row < count, other=0)
    tl.store(ring + line * stride_line + row, value, mask=row < count)
    tl.debug_barrier()  # every thread has read the count
    tl.store(filled, due + 1)
    tl.store(out, line)


def deliver_rows_triton(tokens: Tensor, filled: Tensor, ring: Tensor) -> Tensor:
    out = torch.empty(1, dtype=torch.int64, device=tokens.device)
    pdl = pdl_supported(tokens.device)
    deliver_rows_kernel[(1,)](
        tokens, filled, ring, out, ring.stride(0), tokens.shape[0], LINES=ring.shape[0],
        BLOCK=max(32, triton.next_power_of_2(tokens.shape[0])), PDL=pdl, num_warps=1,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out
