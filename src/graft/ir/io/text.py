"""Graphs as text: one SSA line a node, with every argument, shape, dtype and origin.

%mul_3 = aten.mul.Tensor(%weight, %to_5) : f32[s44, s70, 32]    # model.layers.0.input_layernorm | llama.py:63
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from graft.ir.branches import graphs_of
from graft.ir.nodes import OpOverload, dim_text, module_path, source_line, val

SHORT_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b1",
}


def graph_text(graph: Graph, *, origin: bool = True) -> str:
    """The whole graph, and those inside of it; `origin=False` leaves out module paths, source lines, provenance."""
    parts = []
    for path, part in graphs_of(graph):
        lines = [node_text(node, origin=origin) for node in part.nodes]
        parts.append("\n".join([f"# graph {path}", *lines] if path else lines) + "\n")
    return "\n".join(parts)


def node_text(node: Node, *, origin: bool = True) -> str:
    line = f"{call_text(node)}{type_text(node)}"
    note = " | ".join(filter(None, (module_path(node), source_line(node), node.meta.get("made_by", ""))))
    return f"{line}    # {note}" if origin and note else line


def call_text(node: Node) -> str:
    if node.op == "output":
        return f"return {value_text(node.args[0])}"
    if node.op == "placeholder":
        return f"%{node.name} = input"
    if node.op == "get_attr":
        return f"%{node.name} = self.{node.target}"
    arguments = [value_text(a) for a in node.args] + [f"{k}={value_text(v)}" for k, v in node.kwargs.items()]
    return f"%{node.name} = {target_text(node.target)}({', '.join(arguments)})"


def op_text(node: Node) -> str:
    """What a node calls, or what else it is: `aten.mul.Tensor`, `placeholder`."""
    return target_text(node.target) if node.op == "call_function" else node.op


def target_text(target: Any) -> str:
    """`aten.mul.Tensor`, `graft.rms_norm` (default overloads without their suffix), `operator.mul`."""
    if isinstance(target, OpOverload):
        return str(target).removesuffix(".default")
    if isinstance(target, str):
        return target
    if getattr(target, "namespace", "") == "higher_order":
        return f"higher_order.{target.__name__}"
    return f"{getattr(target, '__module__', '').lstrip('_')}.{getattr(target, '__name__', target)}"


def value_text(value: Any) -> str:
    if isinstance(value, Node):
        return f"%{value.name}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(value_text(item) for item in value) + "]"
    return str(value)


def type_text(node: Node) -> str:
    """A graph that was loaded from a dump has the text of its values, not the values."""
    if "val" not in node.meta and (text := node.meta.get("value_text")) not in (None, "None"):
        return f" : {text}"
    value = val(node)
    return "" if value is None else f" : {abstract_text(value)}"


def abstract_text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(map(dim_text, value.shape))
        device = "" if value.device.type == "cpu" else f"@{value.device}"
        return f"{SHORT_DTYPES.get(value.dtype, str(value.dtype))}[{sizes}]{device}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(abstract_text(item) for item in value) + ")"
    return str(value)
