"""A graph as JSON without loss, and back. Parameters and buffers are referred to by name, not stored."""

from __future__ import annotations

import json
import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from graft.errors import DumpError
from graft.graph.edit import attach_state
from graft.graph.nodes import OpOverload, val
from graft.graph.text import abstract_text

FORMAT = 1
KEPT_META = ("stack_trace", "made_by")


def graph_to_json(gm: GraphModule) -> str:
    nodes = [encode_node(node) for node in gm.graph.nodes]
    state = {name: encode_tensor(t) for name, t in gm.state_dict(keep_vars=True).items()}
    constants = {n: encode_tensor(t) for n, t in gm.named_buffers() if n not in state}
    return json.dumps({"format": FORMAT, "nodes": nodes, "state": state | constants}, indent=0)


def encode_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "buffer"
    return {"kind": kind, "shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


def encode_node(node: Node) -> dict[str, Any]:
    stack = node.meta.get("nn_module_stack") or {}
    return {
        "name": node.name,
        "op": node.op,
        "target": encode_target(node.target),
        "args": encode(node.args),
        "kwargs": {key: encode(value) for key, value in node.kwargs.items()},
        "value": abstract_text(val(node)) if "val" in node.meta else None,
        "modules": [[key, path, str(cls)] for key, (path, cls) in stack.items()],
        **{key: node.meta[key] for key in KEPT_META if node.meta.get(key)},
    }


def encode_target(target: Any) -> str:
    if isinstance(target, str):
        return target
    if isinstance(target, OpOverload):
        return f"torch.ops.{target}"
    return f"{target.__module__}.{target.__name__}"


def encode(value: Any) -> Any:
    """JSON values stand for themselves; all else is a one-key object that names its kind."""
    if isinstance(value, Node):
        return {"node": value.name}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return {"float": repr(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    for kind, types in (("dtype", torch.dtype), ("device", torch.device), ("layout", torch.layout)):
        if isinstance(value, types):
            return {kind: str(value).removeprefix("torch.")}
    if isinstance(value, torch.memory_format):
        return {"memory_format": str(value).removeprefix("torch.")}
    raise DumpError(f"a graph holds the value {value!r} of type {type(value).__name__}, which dumps cannot store")


def graph_from_json(text: str, state: dict[str, torch.Tensor] | None = None) -> GraphModule:
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
    graph, nodes = Graph(), {}
    for entry in data["nodes"]:
        node = graph.create_node(
            entry["op"],
            decode_target(entry["op"], entry["target"]),
            decode(entry["args"], nodes, top=True),
            {key: decode(value, nodes) for key, value in entry["kwargs"].items()},
            name=entry["name"],
        )
        node.meta = {key: entry[key] for key in KEPT_META if key in entry}
        node.meta["nn_module_stack"] = {key: (path, cls) for key, path, cls in entry["modules"]}
        node.meta["value_text"] = entry["value"]
        nodes[entry["name"]] = node
    return GraphModule(root, graph)


def attach(root: torch.nn.Module, name: str, spec: dict[str, Any], given: torch.Tensor | None) -> None:
    tensor = (
        given if given is not None else torch.empty(spec["shape"], dtype=getattr(torch, spec["dtype"]), device="meta")
    )
    if list(tensor.shape) != spec["shape"]:
        raise DumpError(f"{name} has shape {list(tensor.shape)}, the dump expects {spec['shape']}")
    parameter = spec["kind"] == "parameter"
    attach_state(root, name, torch.nn.Parameter(tensor.detach(), requires_grad=False) if parameter else tensor)


def decode_target(op: str, text: str) -> Any:
    if op != "call_function":
        return text
    if text.startswith("torch.ops."):
        namespace, name, overload = text.removeprefix("torch.ops.").split(".")
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)
    module, _, name = text.rpartition(".")
    if module in ("_operator", "operator"):
        return getattr(operator, name)
    raise DumpError(f"the dump calls {text}, which is neither a torch op nor an operator")


def decode(value: Any, nodes: dict[str, Node], top: bool = False) -> Any:
    if isinstance(value, list):
        items = [decode(item, nodes) for item in value]
        return tuple(items) if top else items
    if not isinstance(value, dict):
        return value
    (kind, text), *_ = value.items()
    if kind == "node":
        return nodes[text]
    if kind == "float":
        return float(text)
    return torch.device(text) if kind == "device" else getattr(torch, text)
