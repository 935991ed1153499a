"""Stage 1, recompilations: the guard that failed, the value that was compiled and the one that came."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo.guards
from torch.utils import _pytree as pytree

from graft.stages.needs import swapped
from graft.stages.story import Recompilation
from graft.stages.trace import TraceCollector, current_graph

NEEDS = ("torch._dynamo.guards:get_guard_fail_reason_helper",)
MISMATCH = re.compile(r"(?P<guard>.*?)\.? expected (?P<expected>.*?),? (?:but got|actual) (?P<actual>.*)")
GRAD = re.compile(
    r"(?P<guard>tensor '(?P<name>.*)' requires_grad mismatch)\. expected requires_grad=(?P<expected>\d)"
)
KIND = re.compile(
    r"(?P<guard>expected type of '(?P<name>.*)' to be a tensor type), ' but found <class '(?P<actual>.*)'>"
)
TYPE = re.compile(r"___check_type_id\((?P<name>.*), \d+\)(?:, type=<class '(?P<expected>.*)'>)?")
LENGTH = re.compile(r"len\((?P<name>.*)\) != (?P<expected>\d+)")  # a reason: what failed is that they are equal
SAME = re.compile(r"___check_obj_id\((?P<name>.*), \d+\)")
SIGNS: dict[type[ast.cmpop], str] = {
    ast.Eq: "==", ast.Is: "is", ast.NotEq: "!=", ast.IsNot: "is not", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">",
    ast.GtE: ">=", ast.In: "in", ast.NotIn: "not in",
}  # fmt: skip
TURNED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
COMPILED = "what it was compiled with"
Values = tuple[str, str]  # expected, actual
MOST = 4  # members of a list that are told


@dataclass
class SeenFailures:
    """values: by the new graph and the one whose guard failed. refused: graphs that were over the limit."""

    values: dict[tuple[str, str], Values] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)


@contextmanager
def watch_failures(seen: SeenFailures) -> Iterator[None]:
    """The values are read where torch finds out which guard failed: the frame's own are there alone."""

    def make(before: Callable[..., str]) -> Callable[..., str]:
        def reason_of(manager: Any, f_locals: Mapping[str, Any], compiled: Any, *rest: Any) -> str:
            reason = before(manager, f_locals, compiled, *rest)
            scope = {**manager.global_scope, **manager.closure_vars, **f_locals, "L": f_locals}
            seen.values[current_graph(), str(compiled)] = guard_values(guard_text(reason)[1], scope, f_locals)
            return reason

        return reason_of

    with swapped(torch._dynamo.guards, "get_guard_fail_reason_helper", make):
        yield


def guard_text(text: str) -> tuple[str, str, str]:
    """The graph whose guard it is, the guard, and the comment behind it."""
    first = text.strip().partition("\n")[0]
    previous, colon, rest = first.partition(": ")
    if not colon or not re.fullmatch(r"\d+/\d+", previous.strip()):
        previous, rest = "", first
    guard, _, comment = rest.partition("  #")
    return previous.strip(), guard.strip(), comment


def guard_values(guard: str, scope: Mapping[str, Any], names: Mapping[str, Any]) -> Values:
    """scope: what the guard is evaluated in. names: the variables of the frame."""
    if found := MISMATCH.fullmatch(guard):
        return found["expected"], found["actual"]
    if found := GRAD.fullmatch(guard):
        return str(found["expected"] == "1"), str(found["expected"] != "1")
    if found := KIND.fullmatch(guard):
        return "the type that was compiled", found["actual"]
    if found := TYPE.match(guard):
        return found["expected"] or COMPILED, evaluated(f"type({found['name']})", scope, type_text)
    if found := SAME.match(guard):
        return COMPILED, evaluated(found["name"], scope)
    if found := LENGTH.fullmatch(guard):
        return found["expected"], evaluated(f"len({found['name']})", scope)
    if guard.startswith("Duplicate tensors found"):
        return "different tensors", "the same one"
    if guard == "GLOBAL_STATE changed: grad_mode":
        return str(not torch.is_grad_enabled()), str(torch.is_grad_enabled())
    try:
        tree = ast.parse(guard, mode="eval").body
    except SyntaxError:
        return "", ""
    if isinstance(tree, ast.Compare) and len(tree.ops) == 1:
        return compared(tree, scope, names)
    used = [name for name in names_in(tree) if name in names]
    return "", ", ".join(f"{name} = {value_text(names[name])}" for name in used)


def compared(tree: ast.Compare, scope: Mapping[str, Any], names: Mapping[str, Any]) -> Values:
    """`k == 2` has one side that came; of two that vary, the left one is told as what came."""
    left, right, sign = tree.left, tree.comparators[0], SIGNS[type(tree.ops[0])]
    varies = [any(name in names or name in ("L", "G") for name in names_in(side)) for side in (left, right)]
    if varies == [False, True]:
        left, right, sign = right, left, TURNED.get(sign, sign)
    expected = evaluated(ast.unparse(right), scope) if all(varies) else ast.unparse(right)
    return expected if sign in ("==", "is") else f"{sign} {expected}", evaluated(ast.unparse(left), scope)


def names_in(tree: ast.AST) -> list[str]:
    return list(dict.fromkeys(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)))


def evaluated(source: str, scope: Mapping[str, Any], text: Callable[[Any], str] | None = None) -> str:
    """Empty where it cannot be evaluated: a key that is not there, a size that a tensor does not have."""
    try:
        return (text or value_text)(eval(source, dict(scope)))
    except Exception:  # noqa: BLE001  whatever an expression of the program's values raises
        return ""


def type_text(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def value_text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if type(value) in (list, tuple, dict) and any(isinstance(one, torch.Tensor) for one in pytree.tree_leaves(value)):
        return nested_text(value)
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001  a class of the program may have any __repr__
        return f"a {type_text(type(value))} whose repr raises {type(error).__name__}"
    return text if len(text) < 40 else f"{text[:37]}…"


def nested_text(value: Any) -> str:
    """`[float32[4], 2]`, `{'a': float32[4]}`: what holds tensors, without their numbers."""
    if type(value) is dict:
        inside = [f"{key!r}: {nested_text(one)}" for key, one in value.items()]
    elif type(value) in (list, tuple):
        inside = [nested_text(one) for one in value]
    else:
        return value_text(value)
    shown = ", ".join([*inside[:MOST], *(["…"] if len(inside) > MOST else [])])
    first, last = {dict: "{}", list: "[]", tuple: "()"}[type(value)]
    return f"{first}{shown}{last}"


def read_recompilations(trace: TraceCollector, seen: SeenFailures) -> tuple[Recompilation, ...]:
    """One for each compiled graph whose guards failed; torch gives a text for one reason and a list for several."""
    found: list[Recompilation] = []
    for row in trace.of("recompile_reasons"):
        content = row.json()
        for text in content if isinstance(content, list) else [content]:
            if row.graph not in seen.refused:
                found.append(read_recompilation(row.graph, str(text), seen.values))
    return tuple(dict.fromkeys(found))


def read_recompilation(graph: str, text: str, values: Mapping[tuple[str, str], Values]) -> Recompilation:
    previous, guard, comment = guard_text(text)
    frames = re.findall(r'File "([^"]+)", line (\d+)', text)
    line = f"{frames[-1][0].rsplit('/', 1)[-1]}:{frames[-1][1]}" if frames else ""
    if not line and (near := re.search(r"([^/\s]+\.py:\d+)", comment)):
        line = near[1]
    expected, actual = values.get((graph, previous)) or guard_values(guard, {}, {})
    return Recompilation(graph, previous, guard_told(guard), expected, actual, line)


def guard_told(guard: str) -> str:
    """Without the values that are told beside it, and without addresses."""
    if said := MISMATCH.fullmatch(guard) or GRAD.fullmatch(guard) or KIND.fullmatch(guard):
        return said["guard"]
    if found := TYPE.match(guard):
        return f"type of {found['name']}"
    if found := LENGTH.fullmatch(guard):
        return f"len({found['name']}) == {found['expected']}"
    found = SAME.match(guard)
    return f"{found['name']} is the same object" if found else guard
