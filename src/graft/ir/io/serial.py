"""A graph as JSON without loss, and back. Parameters and buffers are referred to by name, not stored.

With `exact` the text also holds the nesting of inputs and outputs and every node's abstract value, so that the loaded
graph can be transformed and lowered like one that was just captured.
"""

from __future__ import annotations

import importlib
import json
import math
import operator
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from graft.base.errors import DumpError
from graft.ir.branches import CONTROL_FLOW, inner_graphs, is_control_flow
from graft.ir.edit import attach_state, attribute
from graft.ir.effects import alias_sources, is_maybe_view, is_mutating
from graft.ir.io.literals import decode_literal, encode_literal
from graft.ir.io.pytrees import decode_nesting, encode_nesting
from graft.ir.io.text import abstract_text
from graft.ir.io.values import ValueReader, ValueWriter, encode_symbols
from graft.ir.nodes import OpOverload, tensor_val, val, where

FORMAT = 2
HELD = "graphs_inside"  # of a module that is being built: the graphs of control flow, by path
HIGHER_ORDER = "torch.ops.higher_order."
KEPT_META = ("stack_trace", "made_by")
# All that a stored graph may call besides ops: what symbolic numbers are computed with.
FUNCTIONS: Mapping[str, Any] = {
    **{f"_operator.{name}": getattr(operator, name) for name in (
        "getitem", "add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "neg", "pos", "abs",
        "eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "xor", "not_", "invert", "lshift", "rshift",
    )},
    **{f"math.{name}": getattr(math, name) for name in ("floor", "ceil", "trunc", "sqrt", "log2")},
    **{f"torch.{name}": getattr(torch, name) for name in (
        "sym_max", "sym_min", "sym_int", "sym_float", "sym_not", "sym_ite", "sym_sqrt", "sym_sum",
    ) if hasattr(torch, name)},
}  # fmt: skip
# … and in Inductor's graphs: calls made functional, and what graft puts around writes
FUNCTIONALIZED = ("auto_functionalized", "auto_functionalized_v2")
INDUCTOR_HOME = "graft.memory.inductor_fix.functionalization"
INDUCTOR_FUNCTIONS = ("settle", "start_of", "offset_of")


def graph_to_json(gm: GraphModule, *, exact: bool = False) -> str:
    writer = ValueWriter() if exact else None
    nodes = [encode_node(node, writer) for node in gm.graph.nodes]
    persistent = gm.state_dict(keep_vars=True)
    state = {name: encode_tensor(t, True) for name, t in persistent.items()}
    state |= {n: encode_tensor(t, False) for n, t in gm.named_buffers(remove_duplicate=False) if n not in state}
    data: dict[str, Any] = {"format": FORMAT, "nodes": nodes, "state": state}
    inside = {
        path: [encode_node(node, writer) for node in inner.graph.nodes] for path, inner in inner_graphs(gm).items()
    }
    if inside:
        data["graphs"] = inside
    if exact:
        data |= {"symbols": encode_symbols(gm.graph), "nesting": encode_nesting(gm.graph)}
    if writer is not None and not any(is_mutating(node) for node in gm.graph.nodes):
        data["alike"] = writer.alike(copied_storages(gm.graph, writer))
    return json_text(data)


def json_text(data: Mapping[str, Any]) -> str:
    """A node a line. json's encoder in C takes no indent: the whole indented takes five times as long."""
    nodes = ",\n".join(map(json.dumps, data["nodes"]))
    others = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in data.items() if key != "nodes"]
    return "{" + ",\n".join([*others, f'"nodes": [\n{nodes}\n]']) + "}"


def copied_storages(graph: Graph, writer: ValueWriter) -> set[int]:
    """Where a call such as `to` may give a view but copied: that its storage is another must stay readable."""
    found: set[int] = set()
    for node in filter(is_maybe_view, graph.nodes):
        result = writer.number(tensor_val(node))
        given = {writer.number(tensor_val(source)) for source in alias_sources(node)} - {None, result}
        if result is not None and any(writer.contents[n] == writer.contents[result] for n in given if n is not None):
            found.add(result)
    return found


def encode_tensor(tensor: torch.Tensor, persistent: bool) -> dict[str, Any]:
    kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "buffer"
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"kind": kind, "shape": list(tensor.shape), "dtype": dtype, "persistent": persistent}


def encode_node(node: Node, writer: ValueWriter | None) -> dict[str, Any]:
    stack = node.meta.get("nn_module_stack") or {}
    entry = {
        "name": node.name,
        "op": node.op,
        "target": encode_target(node.target),
        "args": [encode(argument) for argument in node.args],
        "kwargs": {key: encode(value) for key, value in node.kwargs.items()},
        "value": abstract_text(val(node)) if "val" in node.meta else None,
        "modules": [[key, path, str(cls)] for key, (path, cls) in stack.items()],
        **{key: node.meta[key] for key in KEPT_META if node.meta.get(key)},
    }
    if writer is not None:
        check_storable(node)
        if "val" in node.meta and node.op != "get_attr":  # an attribute's value follows from its tensor
            entry["val"] = writer.encode(node.meta["val"])
    return entry


def check_storable(node: Node) -> None:
    """Raises DumpError for a node that could not be loaded again."""
    if node.op in ("call_module", "call_method"):
        raise DumpError(f"{where(node)} is a {node.op}, which cannot be stored; capture the module with graft first")
    target = encode_target(node.target)
    called = isinstance(node.target, OpOverload) or is_control_flow(node) or plain_function(target) is not None
    known = node.op != "call_function" or called
    if not known:
        raise DumpError(f"{where(node)} calls {target}, which is neither an op nor an operator")
    module = node.graph.owning_module
    inside = node.op == "get_attr" and bool(node.users) and all(map(is_control_flow, node.users))
    if node.op == "get_attr" and not inside and not isinstance(attribute(module, target), torch.Tensor):
        raise DumpError(f"{where(node)} reads self.{target}, which is not a tensor, so it cannot be stored")


def encode_target(target: Any) -> str:
    if isinstance(target, str):
        return target
    if isinstance(target, OpOverload):
        return f"torch.ops.{target}"
    if getattr(target, "namespace", "") == "higher_order":
        return f"{HIGHER_ORDER}{target.__name__}"
    return f"{getattr(target, '__module__', type(target).__module__)}.{getattr(target, '__name__', target)}"


def encode(value: Any) -> Any:
    """JSON values and lists stand for themselves; all else is a one-key object that names its kind."""
    if isinstance(value, Node):
        return {"node": value.name}
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, OpOverload):
        return {"op": encode_target(value)}
    if isinstance(value, slice):
        return {"slice": [encode(value.start), encode(value.stop), encode(value.step)]}
    return encode_literal(value)


def graph_from_json(text: str, state: Mapping[str, torch.Tensor] | None = None) -> GraphModule:
    """Rebuilds the module. Without `state`, parameters are on the meta device: the graph can be read, not run."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise DumpError(f"the dump is not JSON (truncated?): {error}") from error
    if data.get("format") != FORMAT:
        raise DumpError(f"the dump has format {data.get('format')}, this graft reads {FORMAT}; dump the model again")
    root = torch.nn.Module()
    for name, spec in data["state"].items():
        attach(root, name, spec, (state or {}).get(name))
    reader = ValueReader(data["symbols"], data.get("alike", ())) if "symbols" in data else None
    for path, entries in sorted(data.get("graphs", {}).items(), reverse=True):  # the innermost first
        attach_graph(root, path, entries, reader)
    graph = decode_graph(data["nodes"], reader, root)
    if "nesting" in data:
        graph.set_codegen(decode_nesting(data["nesting"]))
    gm = GraphModule(root, graph)
    # GraphModule takes over what nodes read alone, and registers every buffer as persistent
    for name, spec in data["state"].items():
        attach_state(gm, name, attribute(root, name), persistent=spec["persistent"])
    return gm


def decode_graph(entries: list[dict[str, Any]], reader: ValueReader | None, root: torch.nn.Module) -> Graph:
    graph, nodes = Graph(), {}
    for entry in entries:
        check_names(entry)
        node = graph.create_node(
            entry["op"],
            decode_target(entry["op"], entry["target"]),
            tuple(decode(argument, nodes) for argument in entry["args"]),
            {key: decode(value, nodes) for key, value in entry["kwargs"].items()},
            name=entry["name"],
        )
        node.meta = {key: entry[key] for key in KEPT_META if key in entry}
        node.meta["nn_module_stack"] = {key: (path, cls) for key, path, cls in entry["modules"]}
        node.meta["value_text"] = entry["value"]
        if reader is not None:
            restore_value(node, entry, reader, root)
        nodes[entry["name"]] = node
    return graph


def attach_graph(root: torch.nn.Module, path: str, entries: list[dict[str, Any]], reader: ValueReader | None) -> None:
    """A graph that control flow calls, at its path in `root`."""
    owner, _, leaf = path.rpartition(".")
    holder = module_at(root, path)  # with the tensors that the graph owns itself
    for name, child in getattr(root, HELD, {}).items():
        if name.rpartition(".")[0] == path:
            holder.add_module(name.rpartition(".")[2], child)
    inner = GraphModule(holder, decode_graph(entries, reader, holder))
    vars(root).setdefault(HELD, {})[path] = inner
    if not owner:
        root.add_module(leaf, inner)


def module_at(root: torch.nn.Module, path: str) -> torch.nn.Module:
    """The module at `path` of `root`, or an empty one."""
    known = dict(root.named_modules()).get(path)
    return torch.nn.Module() if known is None else known


def restore_value(node: Node, entry: dict[str, Any], reader: ValueReader, root: torch.nn.Module) -> None:
    if node.op == "get_attr":
        value = attribute(root, str(node.target))
        if isinstance(value, torch.Tensor):
            node.meta["val"] = reader.state(value)
    elif "val" in entry:
        node.meta["val"] = reader.decode(entry["val"])


def attach(root: torch.nn.Module, name: str, spec: dict[str, Any], given: torch.Tensor | None) -> None:
    tensor = (
        given if given is not None else torch.empty(spec["shape"], dtype=getattr(torch, spec["dtype"]), device="meta")
    )
    if list(tensor.shape) != spec["shape"]:
        raise DumpError(f"{name} has shape {list(tensor.shape)}, the dump expects {spec['shape']}")
    if str(tensor.dtype) != f"torch.{spec['dtype']}":
        raise DumpError(f"{name} is {str(tensor.dtype).removeprefix('torch.')}, the dump expects {spec['dtype']}")
    if spec["kind"] == "parameter" and not isinstance(tensor, torch.nn.Parameter):
        tensor = torch.nn.Parameter(tensor.detach(), requires_grad=False)
    attach_state(root, name, tensor, persistent=spec["persistent"])


def decode_target(op: str, text: str) -> Any:
    if op != "call_function":
        return text
    if text.startswith(HIGHER_ORDER) and text.removeprefix(HIGHER_ORDER) in (*CONTROL_FLOW, *FUNCTIONALIZED):
        return getattr(torch.ops.higher_order, text.removeprefix(HIGHER_ORDER))
    if not text.startswith("torch.ops."):
        function = plain_function(text)
        if function is None:
            raise DumpError(f"the dump calls {text}, which is neither a torch op nor an operator")
        return function
    namespace, name, overload = text.removeprefix("torch.ops.").split(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except AttributeError as error:
        raise DumpError(
            f"the graph calls {text.removeprefix('torch.ops.')}, which is not registered here; install the"
            f" package that defines {namespace}::{name}, name its module or file with --plugin (or import it), or"
            " use a torch that has it"
        ) from error


def plain_function(text: str) -> Any:
    """A function of Python or torch on symbolic numbers, or one that graft puts into Inductor's graphs, or None."""
    home, _, name = text.rpartition(".")
    if home == INDUCTOR_HOME and name in INDUCTOR_FUNCTIONS:
        return getattr(importlib.import_module(home), name)
    return FUNCTIONS.get(text) or FUNCTIONS.get(f"_{text}")


def check_names(entry: dict[str, Any]) -> None:
    """Names become Python code when the graph is compiled, so a stored one must be nothing but a name."""
    names = list(entry["kwargs"])
    names += [entry["target"]] if entry["op"] == "placeholder" else []
    names += entry["target"].split(".") if entry["op"] == "get_attr" else []
    for name in names:
        if not re.fullmatch(r"\w+", name):
            raise DumpError(f"the dump holds {name!r} where a name must stand; it is damaged")


def decode(value: Any, nodes: dict[str, Node]) -> Any:
    if isinstance(value, list):
        return [decode(item, nodes) for item in value]
    if isinstance(value, dict):
        (kind, content), *_ = value.items()
        if kind == "node":
            return nodes[content]
        if kind == "op":
            return decode_target("call_function", content)
        if kind in ("tuple", "slice"):
            return (tuple if kind == "tuple" else lambda items: slice(*items))([decode(i, nodes) for i in content])
    return decode_literal(value)
