"""Small questions about FX nodes that every other file asks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, Node

from graft.base.errors import VerificationError

TORCH = f"{Path(torch.__file__).parent}/"
FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*(?:\n[ \t]+(?!File ")([^\n]+))?')
OpOverload = type(torch.ops.aten.add.Tensor)
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def is_op(node: object, *targets: object) -> bool:
    """True when `node` calls one of `targets` (op overloads or plain functions)."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def val(node: object) -> Any:
    """The recorded abstract value of a node (FakeTensor, SymInt, tuple…), or the literal itself."""
    return node.meta.get("val") if isinstance(node, Node) else node


def tensor_val(node: object) -> torch.Tensor | None:
    """The recorded FakeTensor, or None when the value is not one tensor."""
    value = val(node)
    return value if isinstance(value, torch.Tensor) else None


def tensor_of(node: object) -> torch.Tensor:
    """The recorded FakeTensor of a node that must have one."""
    tensor = tensor_val(node)
    if tensor is None:
        raise VerificationError(f"{node} has no tensor recorded as its value")
    return tensor


def static_int(value: object) -> int | None:
    """A plain int, or None for anything symbolic. A symbol that a guard fixed is the number that it was fixed to."""
    if isinstance(value, torch.SymInt):
        text = dim_text(value)
        return int(text) if text.isdigit() else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def same_shape(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal rank and equal sizes, symbolic sizes compared by expression (adds no guard)."""
    return same_sizes(left.shape, right.shape)


def same_sizes(left: Iterable[object], right: Iterable[object]) -> bool:
    left, right = list(left), list(right)
    return len(left) == len(right) and all(dim_text(a) == dim_text(b) for a, b in zip(left, right, strict=True))


def dim_text(size: object) -> str:
    """What str says of a number, symbolic or not: sympy takes 0.2 ms over a product, and a graph says the same few
    again and again."""
    expression = getattr(size.node, "expr", None) if isinstance(size, SYMBOLIC) else None
    return str(size) if expression is None else expression_text(expression)


@lru_cache(maxsize=4096, typed=True)
def expression_text(expression: Any) -> str:
    return str(expression)


def schema_of(node: Node) -> torch.FunctionSchema | None:
    return node.target._schema if isinstance(node.target, OpOverload) else None


def arg_values(node: Node) -> list[tuple[torch.Argument, Any]]:
    """Every schema argument of an op call with the value given, or its default."""
    schema = schema_of(node)
    if schema is None:
        return []
    pairs = []
    for index, argument in enumerate(schema.arguments):
        if not argument.kwarg_only and index < len(node.args):
            pairs.append((argument, node.args[index]))
        else:
            pairs.append((argument, node.kwargs.get(argument.name, argument.default_value)))
    return pairs


def options_of(node: Node) -> dict[str, Any]:
    """Every argument of an op call by name, defaults included."""
    return {argument.name: value for argument, value in arg_values(node)}


def slice_args(node: Node) -> tuple[int, int | None, int | None, int]:
    """dim, start, end and step of an `aten.slice`, counted from the front; None for what is not known."""
    given = options_of(node)
    dim = given["dim"] % tensor_of(node).dim()
    size = static_int(tensor_of(node.args[0]).shape[dim])
    start = 0 if given["start"] is None else static_int(given["start"])
    end = size if given["end"] is None else static_int(given["end"])
    if size is not None:
        start = None if start is None else min(start + size if start < 0 else start, size)
        end = None if end is None else min(end + size if end < 0 else end, size)
    return dim, start, end, given["step"]


def args_of(target: Any, options: Mapping[str, Any], *, defaults: bool = True) -> list[Any]:
    """The arguments of an op in its order, from their names; without the last ones that are defaults, if so asked."""
    arguments = target._schema.arguments
    args = [options[argument.name] for argument in arguments]
    while not defaults and arguments[len(args) - 1].has_default_value():
        if args[-1] != arguments[len(args) - 1].default_value:
            break
        args.pop()
    return args


def leaves(value: Any) -> Iterator[Any]:
    """What is left when lists, tuples and mappings are taken apart."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        yield from leaves(list(value.values()))
    else:
        yield value


def changed_leaves(was: Any, now: Any) -> list[tuple[Any, Any]] | None:
    """The leaves that differ between two arguments, in pairs; None where nesting or keyword names differ."""
    if isinstance(was, slice) and isinstance(now, slice):
        return changed_leaves((was.start, was.stop, was.step), (now.start, now.stop, now.step))
    if isinstance(was, dict) and isinstance(now, dict):
        return changed_leaves(list(was.values()), [now[key] for key in was]) if was.keys() == now.keys() else None
    if isinstance(was, (list, tuple)) and isinstance(now, (list, tuple)):
        if len(was) != len(now):
            return None
        parts = [changed_leaves(one, other) for one, other in zip(was, now, strict=True)]
        return None if None in parts else [pair for part in parts if part for pair in part]
    if isinstance(was, (slice, dict, list, tuple)) or isinstance(now, (slice, dict, list, tuple)):
        return None
    return [] if same_leaf(was, now) else [(was, now)]


def same_leaf(one: Any, other: Any) -> bool:
    """The same node, or the same literal: 2, 2.0 and True give results of other dtypes, 0.0 and -0.0 other signs."""
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, (Node, torch.Tensor)):
        return False
    return repr(one) == repr(other) if isinstance(one, (float, complex)) else one == other


def module_path(node: Node) -> str:
    """The innermost module that made this node, as a dotted path ('' for the root)."""
    stack = node.meta.get("nn_module_stack")
    path = next(reversed(stack.values()))[0] if stack else ""
    return "" if path.startswith("_empty_nn_module_stack") else path


def source_line(node: Node) -> str:
    """`file.py:123` of the innermost line outside torch that made this node, or ''."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    outside = [frame for frame in frames if not frame[0].startswith(TORCH)]
    return f"{outside[-1][0].rsplit('/', 1)[-1]}:{outside[-1][1]}" if outside else ""


def where(node: Node) -> str:
    """`%add_3 (model.layers.0.mlp, modeling_llama.py:83)`, for messages."""
    location = ", ".join(part for part in (module_path(node), source_line(node)) if part)
    return f"%{node.name}" + (f" ({location})" if location else "")


def is_weight(node: object) -> bool:
    """A parameter or buffer: an attribute of the module, or an input that stands for one (`torch.compile`)."""
    return isinstance(node, Node) and (node.op == "get_attr" or bool(node.meta.get("weight")))


def calls(graph: Graph) -> Iterator[Node]:
    return (node for node in graph.nodes if node.op == "call_function")


def placeholders(graph: Graph) -> list[Node]:
    """The inputs, in order."""
    return [node for node in graph.nodes if node.op == "placeholder"]


def outlives_call(node: Node) -> bool:
    """An input or an attribute: its memory is there before the call and after it."""
    return node.op in ("placeholder", "get_attr")


def output_node(graph: Graph) -> Node:
    return next(node for node in reversed(graph.nodes) if node.op == "output")
