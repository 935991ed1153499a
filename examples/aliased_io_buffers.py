"""The module owns its state: two caches, a counter and a rolling window, kept on the compiled module.

python examples/aliased_io_buffers.py [--backend eager|inductor|cuda_graph] [--device cpu|cuda]
"""

from __future__ import annotations

import tempfile

import torch
from torch import Tensor, nn

import graft
from shared import arguments, measured, show

HEADS, DIM, LENGTH, WINDOW = 8, 64, 256, 4


class Streaming(nn.Module):
    """`forward` takes one token; where it goes is the module's own business."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache_k", torch.zeros(1, HEADS, LENGTH, DIM))
        self.register_buffer("cache_v", torch.zeros(1, HEADS, LENGTH, DIM))
        self.register_buffer("window", torch.zeros(1, HEADS, WINDOW, DIM), persistent=False)
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))

    def forward(self, k: Tensor, v: Tensor) -> Tensor:
        self.cache_k.index_copy_(2, self.steps, k)
        self.cache_v.index_copy_(2, self.steps, v)
        self.window.copy_(torch.cat([self.window[:, :, 1:], k], dim=2))
        self.steps += 1
        return (self.cache_k * self.cache_v).sum((2, 3)) + self.window.mean((2, 3))


def main() -> None:
    backend, device = arguments(__doc__)
    tokens = [[torch.randn(1, HEADS, 1, DIM, device=device) for _ in range(2)] for _ in range(5)]
    compiled = graft.compile(Streaming().to(device), tuple(tokens[0]), backend=backend)
    show(compiled)

    reference, pointer = Streaming().to(device), compiled.cache_k.data_ptr()
    for step, token in enumerate(tokens):
        torch.testing.assert_close(compiled(*token), reference(*token))
        print(f"step {step}: steps = {int(compiled.steps)}, cache_k at {compiled.cache_k.data_ptr():#x}")
    assert compiled.cache_k.data_ptr() == pointer and torch.equal(compiled.window, reference.window)

    with tempfile.TemporaryDirectory() as folder:
        compiled.save(f"{folder}/saved")
        loaded = graft.load(f"{folder}/saved")
    token = tokens[0]
    torch.testing.assert_close(loaded(*token), reference(*token))
    print(f"saved, loaded and gone on with: steps = {int(loaded.steps)}")
    loaded.reset()
    print(
        f"after reset: steps = {int(loaded.steps)}, cache_k is {'zero' if not loaded.cache_k.any() else 'not zero'}"
    )
    compiled.reset()
    measured(compiled, tuple(token), [compiled.cache_k, compiled.cache_v])


if __name__ == "__main__":
    main()
