"""Buffers that a forward assigns anew (`self.state = …`), as writes into the memory that they have.

torch.export (2.11, 2.13, non-strict) does this for the module that it is given and forgets assignments in submodules;
it swaps two buffers by two copies one after the other, and a returned view of the old buffer shows the new one.

    before:  self.b = y                     after:  %y; %old = clone(%b); copy_(%b, %y)
             return self_b_before[1]                return %old[1]
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graft.errors import CaptureError
from graft.graph.storage import share_storage, storage_id

Key = tuple[torch.nn.Module, str]


@contextmanager
def assignments_as_writes(module: torch.nn.Module) -> Iterator[None]:
    """Within it, `module.forward` writes assigned buffers back at its end, so that a trace has the writes."""
    forward = module.forward
    own = "forward" in vars(module)

    @functools.wraps(forward)
    def written(*args: Any, **kwargs: Any) -> Any:
        before = buffers(module)
        result = forward(*args, **kwargs)
        now = buffers(module)
        changed = {key: tensor for key, tensor in before.items() if now.get(key) is not tensor}
        if not changed:
            return result
        for key in changed:
            refuse_unequal(module, key, before, now)
        return write_back(result, changed, {key: now[key] for key in changed})

    module.forward = written  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.forward
        if own:
            module.forward = forward  # type: ignore[method-assign]


def buffers(module: torch.nn.Module) -> dict[Key, Tensor]:
    return {(m, name): b for m in module.modules() for name, b in m._buffers.items() if b is not None}


def write_back(result: Any, old: dict[Key, Tensor], new: dict[Key, Tensor]) -> Any:
    """Copies each new value into the old buffer. What was read from an old buffer, and is needed later, is copied."""
    saved: dict[int | None, Tensor] = {}

    def apart(value: Any) -> Any:
        """The same view, of a copy of the old buffer's memory."""
        owner = next((b for b in old.values() if isinstance(value, Tensor) and share_storage(b, value)), None)
        if owner is None:
            return value
        place = storage_id(owner)
        if place not in saved:
            size = owner.untyped_storage().nbytes() // owner.element_size()
            saved[place] = owner.as_strided((size,), (1,), 0).clone()
        return saved[place].as_strided(value.shape, value.stride(), value.storage_offset())

    result = pytree.tree_map(apart, result)
    sources = {key: apart(value) for key, value in new.items()}
    for (owner, name), tensor in old.items():
        tensor.copy_(sources[owner, name])
        setattr(owner, name, tensor)  # torch's own hook then adds a copy of it onto itself, which is dropped
    return result


def refuse_unequal(module: torch.nn.Module, key: Key, before: dict[Key, Tensor], now: dict[Key, Tensor]) -> None:
    """Raises CaptureError for an assignment that a write into the buffer's memory cannot stand for."""
    owner, name = key
    path = next(f"{prefix}.{name}".lstrip(".") for prefix, m in module.named_modules() if m is owner)
    old, new = before[key], now.get(key)
    if new is None:
        raise CaptureError(f"forward takes away the buffer {path}; keep it and write into it")
    if (new.shape, new.dtype, new.device) != (old.shape, old.dtype, old.device):
        raise CaptureError(
            f"forward assigns {new.dtype} {tuple(new.shape)} on {new.device} to the buffer {path}, which is"
            f" {old.dtype} {tuple(old.shape)} on {old.device}; a buffer keeps its shape, dtype and device"
        )
    tied = next((k for k, b in before.items() if k != key and share_storage(b, old)), None)
    if tied is not None:
        raise CaptureError(
            f"forward assigns the buffer {path}, which shares its memory with another buffer ({tied[1]}); eager would"
            " part the two, a write into it would change both. Write into it, or give each a tensor of its own"
        )
