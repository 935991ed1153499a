"""A decode loop over one attention block: prefill, then tokens at run-time positions, with a causal mask.

python examples/aliased_io_kv_attention.py [--backend eager|inductor|cuda_graph] [--device cpu|cuda]
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import graft
from shared import arguments, measured, show

WIDTH, HEADS = 256, 4
DIM = WIDTH // HEADS


class Block(nn.Module):
    """Norm, projections, attention over the cache, projection, residual. The cache is the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], HEADS, DIM).transpose(1, 2)  # [b, heads, s, dim]

    def forward(self, x: Tensor, k_cache: Tensor, v_cache: Tensor, positions: Tensor) -> Tensor:
        h = self.norm(x)  # [b, s, width]
        k_cache.index_copy_(2, positions, self.heads(self.k(h)))
        v_cache.index_copy_(2, positions, self.heads(self.v(h)))
        places = torch.arange(k_cache.shape[2], device=x.device)  # [length]
        mask = places <= positions[:, None]  # [s, length]
        out = F.scaled_dot_product_attention(self.heads(self.q(h)), k_cache, v_cache, attn_mask=mask)
        return x + self.o(out.transpose(1, 2).flatten(2))


def decode(block: nn.Module, prompt: Tensor, steps: int) -> tuple[Tensor, list[Tensor]]:
    """The block's output fed back to it, as a model does with its tokens."""
    caches = [torch.zeros(1, HEADS, 64, DIM, device=prompt.device) for _ in range(2)]
    positions = torch.arange(prompt.shape[1], device=prompt.device)
    x, results = prompt, []
    for _ in range(steps):
        x = block(x, *caches, positions)[:, -1:]
        positions = positions[-1:] + 1
        results.append(x)
    return torch.cat(results, dim=1), caches


@torch.no_grad()
def main() -> None:
    backend, device = arguments(__doc__)
    torch.manual_seed(0)
    block, prompt = Block().eval().to(device), torch.randn(1, 7, WIDTH, device=device)
    caches = [torch.zeros(1, HEADS, 64, DIM, device=device) for _ in range(2)]
    dynamic = {"x": {1: Dim.DYNAMIC}, "k_cache": None, "v_cache": None, "positions": {0: Dim.DYNAMIC}}
    args = (prompt, *caches, torch.arange(7, device=device))
    compiled = graft.compile(block, args, dynamic_shapes=dynamic, backend=backend)
    show(compiled)

    for sequence in range(2):  # no reset in between: a new sequence overwrites what it reads
        prompt = torch.randn(1, 7, WIDTH, device=device)
        got, written = decode(compiled, prompt, steps=20)
        expected, reference = decode(block, prompt, steps=20)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(written[0], reference[0], atol=1e-4, rtol=1e-4)
        print(f"sequence {sequence}: prefill of 7 and 20 steps as in eager, {len(compiled.variants)} captured")
    for note in compiled.report.notes:
        print(f"note: {note}")
    step = (prompt[:, :1], *caches, torch.tensor([8], device=device))
    measured(compiled, step, caches)


if __name__ == "__main__":
    main()
