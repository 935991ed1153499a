"""Which capture a call needs: address and layout of what is bound, layout of what is staged, values of the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graft.backends.buffers import address_of
from graft.base.errors import CaptureRefused, UsageError

BOUND, STAGED, VALUE = "bound", "staged", "value"
PLAIN = (torch.Tensor, torch.nn.Parameter)
Token = tuple[str, Any, Any]  # how it is passed, address or value, layout


@dataclass(frozen=True)
class Key:
    """One token for each input, then for each tensor of the state."""

    inputs: tuple[Token, ...]
    state: StateKey
    constants: tuple[Token, ...] = ()  # state in host memory: a capture holds its values
    default: torch.dtype = field(default_factory=torch.get_default_dtype)  # of what a graph makes without a dtype

    @property
    def tokens(self) -> tuple[Token, ...]:
        at = iter(self.constants)
        return (*self.inputs, *(token if token[0] == BOUND else next(at) for token in self.state.tokens))


@dataclass(frozen=True)
class StateKey:
    """Hashed once: a model has hundreds of tensors, and they seldom move."""

    tokens: tuple[Token, ...]
    hashed: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "hashed", hash(self.tokens))

    def __hash__(self) -> int:
        return self.hashed


class ModuleTensors:
    """The tensors of a module that a graph reads, by name; they are looked up at every call.

    That is done in the tables of the modules, because `getattr` along a path takes several times as long.
    """

    def __init__(self, module: torch.nn.Module, names: Sequence[str], device: torch.device) -> None:
        self.names = tuple(names)
        self._module = module
        self._device = device
        self._submodules: list[tuple[dict[str, Any], str, Any]] = []  # table, name, what was found
        self._tensors: list[tuple[dict[str, Any], str]] = []
        self._seen: list[tuple[Any, int]] = []
        self._key = StateKey(())
        self._constants: list[int] = []
        self._resolve()

    def read(self) -> list[Any]:
        """The tensors as they are now; some may have been replaced since the last call."""
        moved = any(table.get(name) is not found for table, name, found in self._submodules)
        if moved or any(leaf not in table for table, leaf in self._tensors):
            self._resolve()
        return [table[leaf] for table, leaf in self._tensors]

    def _resolve(self) -> None:
        submodules, self._tensors = {}, []
        for name in self.names:
            *owners, leaf = name.split(".")
            module: Any = self._module
            for owner in owners:
                table = module._modules
                if owner not in table:
                    raise UsageError(f"state {name}: the module has no {owner!r} any more; compile it again")
                submodules[id(module), owner] = (table, owner, table[owner])
                module = table[owner]
            tables = (module._parameters, module._buffers, vars(module))
            holder = next((table for table in tables if leaf in table), None)
            if holder is None:
                raise UsageError(f"state {name} is not in the module any more; compile it again")
            self._tensors.append((holder, leaf))
        self._submodules = list(submodules.values())

    def key(self, tensors: Sequence[Any]) -> tuple[StateKey, tuple[Token, ...]]:
        """Same tensors at the same addresses: same key. Their shapes are fixed in the graph."""
        seen = self._seen
        if len(seen) != len(tensors) or any(
            tensor is not old or (address and tensor.data_ptr() != address)
            for tensor, (old, address) in zip(tensors, seen, strict=True)
        ):
            tokens = tuple(
                bound(t) if isinstance(t, torch.Tensor) and t.device == self._device else (VALUE, None, None)
                for t in tensors
            )
            self._seen = [(t, token[1] or 0) for t, token in zip(tensors, tokens, strict=True)]
            self._key = StateKey(tokens)
            self._constants = [index for index, token in enumerate(tokens) if token[0] == VALUE]
        return self._key, tuple(value(tensors[index]) for index in self._constants)


@dataclass(frozen=True)
class Arguments:
    """What the captured function takes: the graph's inputs, then its state."""

    inputs: tuple[str, ...]
    state: ModuleTensors
    written: frozenset[int]  # positions of the arguments whose memory the graph writes
    device: torch.device
    placed: frozenset[int] = frozenset()  # those that `as_strided` reads, from the start of their storage

    def name(self, index: int) -> str:
        count = len(self.inputs)
        return f"input {self.inputs[index]}" if index < count else f"state {self.state.names[index - count]}"

    def key(self, args: Sequence[Any]) -> Key:
        """Inputs are staged unless the graph writes to memory of theirs, be it through another argument."""
        count = len(self.inputs)
        shared = {address_of(args[index]) for index in self.written if isinstance(args[index], torch.Tensor)} - {0}
        tokens = []
        for index in range(count):
            arg = args[index]
            if not isinstance(arg, torch.Tensor):
                tokens.append(value(arg))
            elif type(arg) not in PLAIN:
                raise CaptureRefused(
                    f"{self.name(index)} is a {type(arg).__name__}, a tensor class of its own, and a replay works on"
                    " plain memory; use backend='eager' or 'inductor' for it"
                )
            elif index in self.written or address_of(arg) in shared:
                tokens.append(bound(arg))
            elif index in self.placed:
                tokens.append((BOUND, (arg.data_ptr(), address_of(arg)), layout(arg)))
            else:
                tokens.append((STAGED, None, layout(arg)))
        return Key(tuple(tokens), *self.state.key(args[count:]))

    def changes(self, old: Key, new: Key) -> str:
        """What differs from the call before: `input x: new shape (2, 1, 8), was (4, 1, 8); …`."""
        defaults = f"default dtype {new.default}, was {old.default}"
        texts = [defaults] * (old.default is not new.default) + [
            f"{self.name(index)}: {change(was, now, index >= len(self.inputs))}"
            for index, (was, now) in enumerate(zip(old.tokens, new.tokens, strict=True))
            if was != now
        ]
        return "; ".join(texts[:4]) + (f"; and {len(texts) - 4} more" if len(texts) > 4 else "")


def layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg(), tensor.device


def bound(tensor: torch.Tensor) -> Token:
    return BOUND, tensor.data_ptr(), layout(tensor)


def value(item: Any) -> Token:
    """As text: 1, 1.0 and True are equal but not the same, and nan does not equal itself."""
    return VALUE, repr(item.tolist() if isinstance(item, torch.Tensor) else item), None


def change(old: Token, new: Token, is_state: bool) -> str:
    if VALUE in (old[0], new[0]):
        return f"new value {new[1]}, was {old[1]}"
    if old[2] != new[2]:
        names = ("shape", "strides", "dtype", "conjugate bit", "negative bit", "device")
        pairs = zip(names, old[2], new[2], strict=True)
        return ", ".join(f"new {name} {now}, was {was}" for name, was, now in pairs if was != now)
    if old[0] != new[0]:
        return f"{'shares' if new[0] == BOUND else 'no longer shares'} memory that the graph writes"
    return "buffer was replaced" if is_state else "another tensor"
