"""The memory around a capture: staging buffers, written state that is put back, and where results lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from graft.ir.storage import extent, with_bits

# Gives one result of a replay from the call's arguments and the capture's own results, by their position.
Take = Callable[[Sequence[Any], Mapping[int, torch.Tensor]], Any]


# ── staging ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Staging:
    """A buffer of one layout at a fixed address. `flat` when elements share memory: then the memory is copied."""

    buffer: torch.Tensor
    flat: bool

    @staticmethod
    def like(tensor: torch.Tensor) -> Staging:
        with torch.inference_mode(False):  # a buffer made inside inference mode could not be filled outside of it
            buffer = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            buffer = with_bits(buffer, tensor.is_conj(), tensor.is_neg())  # so that views of it are the caller's
        return Staging(buffer, not elements_are_apart(tensor))

    def fill(self, given: torch.Tensor) -> int:
        """Copies `given` in; the number of bytes."""
        source, target = (row_of(given), row_of(self.buffer)) if self.flat else (given, self.buffer)
        target.copy_(source)
        return source.numel() * source.itemsize


def elements_are_apart(tensor: torch.Tensor) -> bool:
    """No two elements at one address, as far as strides show it; `expand` and sliding windows are not."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return False
        reach += max(size - 1, 0) * stride
    return True


def row_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory from the first element to the last, gaps included, as one row."""
    return tensor.as_strided((extent(tensor),), (1,))


# ── written state ───────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def untouched(written: Sequence[torch.Tensor], devices: Sequence[torch.device]) -> Iterator[Callable[[], None]]:
    """What runs inside leaves `written` and the random number generators as they were, errors included.

    Gives what puts `written` back, for between two runs: a program may write where a counter of its own says, and the
    second run would write one further. The copies need as much free memory as what is written, for the time of a
    capture only.
    """
    addresses = {(t.data_ptr(), t.shape, t.stride(), t.dtype): t for t in written}
    rows = [t if elements_are_apart(t) else row_of(t) for t in addresses.values()]
    saved = [(row, row.clone()) for row in rows]  # all before any is put back: they may overlap

    def put_back() -> None:
        for row, copy in saved:
            row.copy_(copy)

    with torch.random.fork_rng(devices=devices):
        try:
            yield put_back
        finally:
            put_back()


# ── results ─────────────────────────────────────────────────────────────────────────────────────────────────────


def address_of(tensor: torch.Tensor) -> int:
    """What tensors that share memory have in common; 0 where there is no memory."""
    return tensor.untyped_storage().data_ptr()


def view(memory_of: torch.Tensor, like: torch.Tensor, offset: int) -> torch.Tensor:
    """A tensor of the dtype, the layout and the bits of `like`, `offset` bytes into the storage of `memory_of`."""
    empty = torch.empty(0, dtype=like.dtype, device=memory_of.device)
    made = empty.set_(memory_of.untyped_storage(), offset // like.itemsize, like.shape, like.stride())
    return with_bits(made, like.is_conj(), like.is_neg())


def start(tensor: torch.Tensor) -> int:
    """Bytes from the start of its storage."""
    return int(tensor.storage_offset()) * tensor.itemsize


def locate(outputs: Sequence[Any], args: Sequence[Any]) -> tuple[list[Take], dict[int, torch.Tensor]]:
    """How to give each result of a capture made with `args`, and the results that lie in its own memory.

    A result in the memory of an argument is given in that of the caller's, as eager would: it is the tensor itself
    or a view of it. `args` and their views are not kept.
    """
    owners = {
        address_of(arg): index for index, arg in enumerate(args) if isinstance(arg, torch.Tensor) and address_of(arg)
    }
    takes: list[Take] = []
    kept: dict[int, torch.Tensor] = {}
    for position, output in enumerate(outputs):
        same = next((index for index, arg in enumerate(args) if arg is output), None)
        if not isinstance(output, torch.Tensor):
            takes.append(take_value(output))
        elif same is not None:
            takes.append(take_argument(same))
        elif address_of(output) in owners:
            owner = owners[address_of(output)]
            takes.append(take_view(owner, output, start(output) - start(args[owner])))
        else:
            kept[position] = output
            takes.append(take_kept(position))
    return takes, kept


def take_value(value: Any) -> Take:
    return lambda _args, _kept: value


def take_argument(index: int) -> Take:
    return lambda args, _kept: args[index]


def take_kept(position: int) -> Take:
    return lambda _args, kept: kept[position]


def take_view(index: int, output: torch.Tensor, offset: int) -> Take:
    like = torch.empty(0, dtype=output.dtype, device="meta").as_strided(output.shape, output.stride())
    like = with_bits(like, output.is_conj(), output.is_neg())
    return lambda args, _kept: view(args[index], like, start(args[index]) + offset)


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def copies(kept: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Results that the next replay does not overwrite. Those that share memory share it in the copies too."""
    addresses = [address_of(tensor) for tensor in kept.values()]
    stores: dict[int, torch.Tensor] = {}
    made = {}
    for (position, tensor), where in zip(kept.items(), addresses, strict=True):
        if addresses.count(where) == 1 and not (tensor.is_conj() or tensor.is_neg()):
            made[position] = tensor.clone()
        else:
            if where not in stores:
                stores[where] = storage_bytes(tensor).clone()
            made[position] = view(stores[where], tensor, start(tensor))
    return made
