"""Where a module's result stands in a graph, and what became of it in the pipeline.

model.layers.0.mlp ─▶ %linear_6, as captured ─▶ successors of each transform ─▶ %fused_linear_3 (fuse_residual…)
                                             └▶ replaced without one: computed inside %fused_linear_2
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.fx import Graph, Node

from graft.ir.nodes import module_path, tensor_val
from graft.passes.report import Report, TransformRecord


@dataclass(frozen=True)
class Followed:
    """node: the name that the value has in the final graph, '' where no node gives it. made_by: the transform that
    made that node or took the value into a larger op; '' for a value that is as it was captured. inside: that op."""

    node: str
    made_by: str = ""
    inside: str = ""


def results(graph: Graph, outputs: Mapping[str, Tensor]) -> dict[str, Node]:
    """By module path, the node of its result: the last one inside that somebody outside reads, of that shape.

    outputs: what the modules returned for some prompt. A module without such a node, as dropout is, is left out.
    """
    found: dict[str, Node] = {}
    for node in graph.nodes:
        value = tensor_val(node)
        if node.op != "call_function" or value is None:
            continue
        home = module_path(node)
        for path in (path for path in around(home) if path in outputs):
            given = outputs[path]
            left = any(not inside(module_path(user), path) or user.op == "output" for user in node.users)
            if left and value.dim() == given.dim() and str(value.shape[-1]) == str(given.shape[-1]):
                found[path] = node
    return found


def around(path: str) -> Iterator[str]:
    """`a.b.c` → a, a.b, a.b.c."""
    parts = path.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts) + 1) if path)


def inside(path: str, module: str) -> bool:
    return path == module or path.startswith(f"{module}.")


def follow(name: str, report: Report, final: Iterable[str]) -> Followed:
    """The node through all transforms, in the order in which they ran."""
    made_by, present = "", set(final)
    for record in report.transforms.values():
        if record.status != "applied":
            continue
        known = dict(pair for match in record.matches for pair in match.successors)
        if name in known and known[name] != name:
            name, made_by = known[name], record.name
        elif swallowed := swallower(record, name):
            return Followed("", record.name, swallowed)
    return Followed(name if name in present else "", made_by)


def swallower(record: TransformRecord, name: str) -> str:
    """The node that computes this value inside of itself since this transform, or ''."""
    for match in record.matches:
        if name in match.replaced and name not in match.made:
            return match.made[0] if match.made else match.name
    return ""
