"""Tensors that a program holds itself stay as they are while it is traced.

torch takes a plain tensor (an attribute that is no buffer, a global) for a constant, and a call whose tensors are all
constants is run for real as well (2.11, 2.13): `self.count.add_(1)` would count the trace.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from graft.ir.nodes import leaves
from graft.ir.storage import storage_id


class KeepConstants(TorchDispatchMode):
    """Within it, memory is copied before it is first written for real; at its end the copies are put back."""

    supports_higher_order_operators = True  # torch.cond, while_loop, flex_attention pass through, too

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Dynamo, which takes the branches of torch.cond and flex_attention apart, works within it as without it."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}  # storage → all of it, and its copy

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = getattr(func, "_schema", None)
        if schema is None or schema.is_mutable:  # a higher-order operator has none: it may write whatever it is given
            for value in leaves((args, kwargs or {})):
                self.keep(value if type(value) in (Tensor, torch.nn.Parameter) else getattr(value, "constant", None))
        return func(*args, **(kwargs or {}))

    def keep(self, tensor: Any) -> None:
        storage = storage_id(tensor) if isinstance(tensor, Tensor) else None
        if storage is not None and storage not in self.kept:
            with torch._C._DisableTorchDispatch():  # the modes of the trace would take it for a part of the program
                memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
                self.kept[storage] = (memory, memory.clone())

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        for memory, copy in self.kept.values():
            memory.copy_(copy)
