"""What rank 0 tells the others: a kind and some tensors of int64, in one broadcast where they are short.

ints   total, kind, number of tensors, then dims and sizes of each, then all their elements
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as distributed
from torch import Tensor

from graft.dist.group import TorchGroup

SHORT = 4096  # ints of the first broadcast: a decode step of 256 sequences has about 2,000
STEP, COPY, STOP, SAVE, COPY_STATE = 1, 2, 3, 4, 5


def as_ints(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.int64)


def as_text(ints: Tensor) -> str:
    return bytes(ints.tolist()).decode()


@dataclass
class Messages:
    group: TorchGroup

    def send(self, kind: int, tensors: Sequence[Tensor] = ()) -> None:
        """From rank 0 to all others; tensors on any device."""
        flat = encode(kind, tensors)
        self.broadcast(flat[:SHORT] if len(flat) >= SHORT else np.pad(flat, (0, SHORT - len(flat))))
        if len(flat) > SHORT:
            self.broadcast(flat[SHORT:])

    def receive(self) -> tuple[int, list[Tensor]]:
        """Waits for the next."""
        first = np.zeros(SHORT, dtype=np.int64)
        self.broadcast(first)
        total = int(first[0])
        if total > SHORT:
            rest = np.zeros(total - SHORT, dtype=np.int64)
            self.broadcast(rest)
            first = np.concatenate([first, rest])
        return decode(first)

    def broadcast(self, values: np.ndarray) -> None:
        distributed.broadcast(torch.from_numpy(values), src=0, group=self.group.messages)


def encode(kind: int, tensors: Sequence[Tensor]) -> np.ndarray:
    """All as one array."""
    head = [kind, len(tensors)]
    for tensor in tensors:
        head += [tensor.dim(), *tensor.shape]
    parts = [tensor.reshape(-1).cpu().numpy() for tensor in tensors]
    total = 1 + len(head) + sum(map(len, parts))
    return np.concatenate([np.array([total, *head], dtype=np.int64), *parts])


def decode(flat: np.ndarray) -> tuple[int, list[Tensor]]:
    kind, count = int(flat[1]), int(flat[2])
    at, shapes = 3, []
    for _ in range(count):
        dims = int(flat[at])
        shapes.append(tuple(int(size) for size in flat[at + 1 : at + 1 + dims]))
        at += 1 + dims
    found = []
    for shape in shapes:
        size = int(np.prod(shape))
        found.append(torch.from_numpy(flat[at : at + size].copy()).view(shape))
        at += size
    return kind, found
