"""One call of an op, as kernels are asked about it: its arguments by name, and who asks."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch


@dataclass(frozen=True)
class Asker:
    """The backend that asks for a kernel. problem: why it cannot compile this call into its step, or None."""

    backend: str = "eager"
    problem: Callable[[], str | None] = lambda: None


EAGER = Asker()  # a CUDA graph and Inductor call kernels one by one, too


class Call(tuple[Any, ...]):
    """`call.x`, `call.eps`: arguments that were left out have their defaults. Behind them: the asker."""

    __slots__ = ()

    if TYPE_CHECKING:
        asker: Asker

        def __new__(cls, *args: Any, **named: Any) -> Self: ...
        def __getattr__(self, name: str) -> Any: ...

    @property
    def device(self) -> torch.device:
        """That of the first tensor."""
        return next(value.device for value in self if isinstance(value, torch.Tensor))

    def by(self, asker: Asker) -> Call:
        """The same call, asked for by another backend."""
        return type(self)(*self[:-1], asker)


def call_class(name: str, arguments: list[Any]) -> type[Call]:
    """For the arguments of an op's schema. A tuple: one is made at every call of an op."""
    names = [argument.name for argument in arguments]
    defaults = [argument.default_value for argument in arguments if argument.has_default_value()]
    fields: Any = namedtuple(f"{name}_call", [*names, "asker"], defaults=[*defaults, EAGER], rename=True)
    return type(f"{name}_call", (Call, fields), {"__slots__": ()})
