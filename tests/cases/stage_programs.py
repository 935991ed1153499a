"""Programs that provoke one thing each in a stage of torch.compile. `NAME_inputs`: what to call NAME with."""

from __future__ import annotations

import torch
from torch import Tensor


def scaled(x: Tensor, k: int) -> Tensor:
    y = x * k
    return torch.nn.functional.silu(y)


def scaled_inputs() -> list[tuple[Tensor, int]]:
    return [(torch.ones(4, 8), 2), (torch.ones(4, 8), 3)]


def longer(x: Tensor) -> Tensor:
    return x * 2 + 1


def longer_inputs() -> list[tuple[Tensor]]:
    return [(torch.ones(4),), (torch.ones(5),)]


def printed(x: Tensor) -> Tensor:
    y = x * 2
    print("value")
    return y + 1


def printed_inputs() -> list[tuple[Tensor]]:
    return [(torch.ones(4),)]


def step(cache: Tensor, out: Tensor, x: Tensor, w: Tensor) -> Tensor:
    h = torch.nn.functional.silu(x)
    y = h @ w
    cache.mul_(2)
    out.copy_(y)
    same = x.view(4, 8)
    z = same.t().contiguous()
    return (y - y.mean(-1, keepdim=True)) * 3, z


def step_inputs() -> list[tuple[Tensor, ...]]:
    return [(torch.zeros(4, 16), torch.zeros(4, 16), torch.ones(4, 8), torch.ones(8, 16))]


def endless(x: Tensor, k: str) -> Tensor:
    return x + len(k)


def endless_inputs() -> list[tuple[Tensor, str]]:
    return [(torch.ones(2), f"{'a' * n}{n}") for n in range(12)]


def picked(table: Tensor, index: Tensor) -> Tensor:
    return table[index] * 2


def picked_inputs() -> list[tuple[Tensor, Tensor]]:
    return [(torch.ones(4, 8), torch.tensor([1, 3, 7]))]


def counted(x: Tensor, position: Tensor) -> Tensor:
    y = torch.log(x[position])
    position.add_(1)
    return y


def counted_inputs() -> list[tuple[Tensor, Tensor]]:
    return [(torch.arange(4.0), torch.tensor([0, 1]))]


def raises(x: Tensor) -> Tensor:
    raise ValueError("not today")


def raises_inputs() -> list[tuple[Tensor]]:
    return [(torch.ones(2),)]


def untraceable(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return torch.tensor(sum(x.tolist()))


def untraceable_inputs() -> list[tuple[Tensor]]:
    return [(torch.ones(2),)]


def without_inputs(x: Tensor) -> Tensor:
    return x


def chained(x: Tensor, w: Tensor) -> Tensor:
    """Three equal pieces between softmaxes, and the ends; the first is the only one that C++ is compiled for."""
    x = (x + 1) * x.shape[0]
    for _ in range(4):
        x = torch.softmax(x @ w, -1)
    return x @ w


def chained_inputs(size: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.rand(size, 4), torch.rand(4, 4))]
