"""What a captured graph takes: one line of plain data an input, with symbolic sizes as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch.fx import GraphModule

from graft.graph.literals import decode_literal, encode_literal
from graft.graph.pytrees import keyword_names
from graft.graph.symbols import SYMBOLIC, Symbol, symbols_of


@dataclass(frozen=True)
class InputSpec:
    """A tensor (`f32[s0, 16]` on cpu), a symbolic number, or a value that is fixed in the graph."""

    name: str
    kind: Literal["tensor", "symbol", "fixed"]
    dtype: str = ""
    device: str = ""
    shape: tuple[int | str, ...] = ()
    value: Any = None  # of a fixed input; the expression of a symbolic one


@dataclass(frozen=True)
class Signature:
    """The flat inputs in order, which of the outer ones go by keyword, and the symbols with what they may be."""

    inputs: tuple[InputSpec, ...]
    keywords: tuple[str, ...] = ()
    symbols: tuple[Symbol, ...] = ()

    @staticmethod
    def of(gm: GraphModule) -> Signature:
        nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
        inputs = tuple(describe(node.name, node.meta.get("val")) for node in nodes)
        return Signature(inputs, keyword_names(gm.graph), symbols_of(node.meta.get("val") for node in nodes))

    def to_data(self) -> dict[str, Any]:
        inputs = [asdict(item) | {"value": encode_literal(item.value)} for item in self.inputs]
        return asdict(self) | {"inputs": inputs}

    @staticmethod
    def from_data(data: dict[str, Any]) -> Signature:
        inputs = [
            InputSpec(**entry | {"shape": tuple(entry["shape"]), "value": decode_literal(entry["value"])})
            for entry in data["inputs"]
        ]
        symbols = [Symbol(**entry) for entry in data["symbols"]]
        return Signature(tuple(inputs), tuple(data["keywords"]), tuple(symbols))


def describe(name: str, value: Any) -> InputSpec:
    if isinstance(value, torch.Tensor):
        shape = tuple(str(size) if isinstance(size, torch.SymInt) else int(size) for size in value.shape)
        dtype = str(value.dtype).removeprefix("torch.")
        return InputSpec(name, "tensor", dtype, str(value.device), shape)
    if isinstance(value, SYMBOLIC):
        return InputSpec(name, "symbol", value=str(value))
    return InputSpec(name, "fixed", value=value)
