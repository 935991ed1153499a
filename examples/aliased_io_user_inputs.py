"""The caller owns the caches: they are written in place, at a position known only at run time.

python examples/aliased_io_user_inputs.py [--backend eager|inductor|cuda_graph] [--device cpu|cuda]
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import graft
from shared import arguments, measured, show

HEADS, DIM = 8, 64


class Append(nn.Module):
    """Puts one token's key and value into the caches, in two ways, and reads what is there so far."""

    def forward(self, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
        k_cache.index_copy_(2, position, k)  # [1, heads, length, dim] at [1]
        v_cache[:, :, position] = v
        return (k_cache * v_cache).sum((2, 3))  # [1, heads]


def main() -> None:
    backend, device = arguments(__doc__)
    caches = [torch.zeros(1, HEADS, 256, DIM, device=device) for _ in range(2)]
    token = [torch.randn(1, HEADS, 1, DIM, device=device) for _ in range(2)]
    compiled = graft.compile(Append(), (*caches, *token, torch.tensor([0], device=device)), backend=backend)
    show(compiled)

    expected = [cache.clone() for cache in caches]
    pointers = [cache.data_ptr() for cache in caches]
    for step in range(3):
        position = torch.tensor([step], device=device)
        token = [torch.randn(1, HEADS, 1, DIM, device=device) for _ in range(2)]
        result = compiled(*caches, *token, position)
        torch.testing.assert_close(result, Append()(*expected, *token, position))
        print(f"step {step}: K at {caches[0].data_ptr():#x}, V at {caches[1].data_ptr():#x}")
    assert pointers == [cache.data_ptr() for cache in caches]
    assert all(torch.equal(cache, other) for cache, other in zip(caches, expected, strict=True))

    longer = [torch.zeros(1, HEADS, 4096, DIM, device=device) for _ in range(2)]
    compiled(*longer, *token, torch.tensor([3000], device=device))
    print(f"a cache of 4096 positions runs on the same graph: {len(compiled.variants)} captured")
    measured(compiled, (*longer, *token, torch.tensor([5], device=device)), longer)


if __name__ == "__main__":
    main()
