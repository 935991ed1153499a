"""Abstract values of nodes (fake tensors, symbolic numbers, containers of them) as JSON and back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.fx import Graph

from graft.base.errors import DumpError
from graft.ir.io.literals import decode_literal, encode_literal
from graft.ir.io.symbols import Symbol, check_readable, declare, evaluate, fresh_mode, is_dense, symbols_of
from graft.ir.nodes import SYMBOLIC, dim_text


def encode_symbols(graph: Graph) -> list[dict[str, Any]]:
    return [asdict(symbol) for symbol in symbols_of(node.meta.get("val") for node in graph.nodes)]


@dataclass
class ValueWriter:
    """Writes values; tensors that share memory get one number in `storages`.

    contents: by that number, what was written of the storage, without the number. Two storages of equal contents can
    be read as one where nothing depends on which is which (serial.py decides that): a fake tensor with symbolic sizes
    takes 3 ms to make, and equal layers have equal ones.
    """

    storages: dict[int, int] = field(default_factory=dict)
    contents: list[list[str]] = field(default_factory=list)

    def encode(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return {"tensor": self.tensor(value)}
        if isinstance(value, SYMBOLIC):
            return {"size": stored_size(value)}
        if isinstance(value, tuple):
            return {"tuple": [self.encode(item) for item in value]}
        if isinstance(value, list):
            return [self.encode(item) for item in value]
        return encode_literal(value)

    def tensor(self, value: torch.Tensor) -> dict[str, Any]:
        if not is_dense(value):
            raise DumpError(f"a value of layout {value.layout} cannot be stored; only dense tensors can")
        storage = value.untyped_storage()
        number = self.storages.setdefault(storage._cdata, len(self.storages))
        entry = {
            "shape": [stored_size(size) for size in value.shape],
            "stride": [stored_size(stride) for stride in value.stride()],
            "offset": stored_size(value.storage_offset()),
            "dtype": str(value.dtype).removeprefix("torch."),
            "device": str(value.device),
            "bytes": stored_size(storage.nbytes()),
        }
        self.contents += [[] for _ in range(number + 1 - len(self.contents))]
        self.contents[number].append(str(entry))
        return {**entry, "storage": number}

    def number(self, value: torch.Tensor | None) -> int | None:
        """Of the storage of a value that was written."""
        return None if value is None else self.storages.get(value.untyped_storage()._cdata)

    def alike(self, apart: Collection[int]) -> list[int]:
        """For each storage the first one of equal contents; itself for those in `apart`."""
        first: dict[tuple[str, ...], int] = {}
        return [
            number if number in apart else first.setdefault(tuple(content), number)
            for number, content in enumerate(self.contents)
        ]


def stored_size(size: Any) -> Any:
    """An int, or the text of a symbolic one."""
    if not isinstance(size, SYMBOLIC):
        return size
    text = dim_text(size)
    check_readable(text)
    return text


class ValueReader:
    """Reads values into a fresh FakeTensorMode; tensors of one storage are views of one fake tensor.

    alike: for each storage the one that it is read as; empty where every storage is read as its own.
    """

    def __init__(self, symbols: list[dict[str, Any]], alike: Sequence[int] = ()) -> None:
        self.mode = fresh_mode()
        self.alike = alike
        self.names = declare([Symbol(**entry) for entry in symbols], self.mode)
        self.bases: dict[int, torch.Tensor] = {}  # storage → a tensor that covers all of it
        self.sizes: dict[str, Any] = {}
        self.made: dict[str, torch.Tensor] = {}

    def decode(self, entry: Any) -> Any:
        if isinstance(entry, list):
            return [self.decode(item) for item in entry]
        if isinstance(entry, dict) and "tensor" in entry:
            return self.tensor(entry["tensor"])
        if isinstance(entry, dict) and "size" in entry:
            return self.size(entry["size"])
        if isinstance(entry, dict) and "tuple" in entry:
            return tuple(self.decode(item) for item in entry["tuple"])
        return decode_literal(entry)

    def size(self, entry: Any) -> Any:
        if not isinstance(entry, str):
            return entry
        if entry not in self.sizes:
            self.sizes[entry] = evaluate(entry, self.names)
        return self.sizes[entry]

    def tensor(self, entry: dict[str, Any]) -> torch.Tensor:
        """Equal entries are one fake tensor, as they are for equal layers in a graph that was just transformed."""
        if self.alike:
            entry = {**entry, "storage": self.alike[entry["storage"]]}
        key = str(entry)
        if key not in self.made:
            with self.mode, torch.no_grad():
                self.made[key] = self.make(entry)
        return self.made[key]

    def make(self, entry: dict[str, Any]) -> torch.Tensor:
        kind: dict[str, Any] = {
            "dtype": decode_literal({"dtype": entry["dtype"]}),
            "device": torch.device(entry["device"]),
        }
        shape, stride = [self.size(s) for s in entry["shape"]], [self.size(s) for s in entry["stride"]]
        base = self.bases.get(entry["storage"])
        if base is None and entry["offset"] == 0:
            whole = whole_storage(entry, shape, stride, kind)
            if whole is not None:
                self.bases[entry["storage"]] = whole
                return whole
        if base is None:
            count = self.size(entry["bytes"]) // kind["dtype"].itemsize
            base = self.bases[entry["storage"]] = torch.empty([count], **kind)
        viewed = base if base.dtype == kind["dtype"] else base.view(kind["dtype"])
        return viewed.as_strided(shape, stride, self.size(entry["offset"]))

    def state(self, tensor: torch.Tensor) -> torch.Tensor:
        """The abstract value of a parameter or buffer."""
        return self.mode.from_tensor(tensor, static_shapes=True)


def whole_storage(entry: dict[str, Any], shape: list[Any], stride: list[Any], kind: dict[str, Any]) -> Any:
    """A new tensor that covers its storage as the entry says, or None. Each attempt of symbolic sizes takes 1 ms:
    with symbolic strides empty_strided says its bytes in other words than an op, and is not tried."""
    if not any(isinstance(s, SYMBOLIC) for s in stride):
        whole = torch.empty_strided(shape, stride, **kind)
    elif entry["stride"][-1] != 1:
        return None
    else:
        whole = torch.empty(shape, **kind)
        if [stored_size(s) for s in whole.stride()] != entry["stride"]:
            return None
    return whole if stored_size(whole.untyped_storage().nbytes()) == entry["bytes"] else None
