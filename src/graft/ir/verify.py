"""The checks that a graph must pass after every transform."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, map_arg

from graft.base.errors import VerificationError
from graft.ir.branches import is_control_flow
from graft.ir.edit import AbstractCalls, attach_state
from graft.ir.io.text import abstract_text
from graft.ir.nodes import dim_text, val, where


@dataclass(frozen=True)
class GraphSnapshot:
    """A graph as it was, to compare with and to go back to. Taking one costs a few microseconds a node."""

    nodes: tuple[tuple[Node, str, str, Any, Any, Any, dict[str, Any]], ...]
    calls: dict[str, tuple[Any, Any, Any]]
    codegen: Any
    state: dict[str, torch.Tensor]
    transient: frozenset[str]  # buffers that are not in the state_dict
    versions: dict[str, int]  # how often each tensor of the state had been written

    @staticmethod
    def take(gm: GraphModule) -> GraphSnapshot:
        nodes = tuple((n, n.name, n.op, n.target, n.args, n.kwargs, dict(n.meta)) for n in gm.graph.nodes)
        calls = {n.name: (n.target, n.args, n.kwargs) for n in gm.graph.nodes}
        state = module_state(gm)
        versions = {name: version(tensor) for name, tensor in state.items()}
        transient = frozenset(transient_buffers(gm))
        return GraphSnapshot(nodes, calls, gm.graph._codegen, state, transient, versions)

    def unchanged(self, node: Node) -> bool:
        """FX replaces the argument tuple whenever it rewires a node, so identity is enough."""
        target, args, kwargs = self.calls.get(node.name, (None, None, None))
        return node.target is target and node.args is args and node.kwargs is kwargs

    def restore(self, gm: GraphModule) -> None:
        """Puts graph and state back: what was added since goes, what was dropped returns."""
        current = module_state(gm)
        for name in current.keys() - self.state.keys():
            owner, _, leaf = name.rpartition(".")
            delattr(gm.get_submodule(owner), leaf)
        for name, tensor in self.state.items():
            if current.get(name) is not tensor:
                attach_state(gm, name, tensor, persistent=name not in self.transient)
        graph = Graph()
        copies: dict[Node, Node] = {}
        for node, name, op, target, args, kwargs, meta in self.nodes:
            new_args, new_kwargs = map_arg(args, copies.__getitem__), map_arg(kwargs, copies.__getitem__)
            copy = graph.create_node(op, target, new_args, new_kwargs, name=name, type_expr=node.type)
            copy.meta = meta
            copies[node] = copy
        graph.set_codegen(self.codegen)
        gm.graph = graph
        gm.recompile()


def version(tensor: torch.Tensor) -> int:
    """How often it was written; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version


def module_state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name; tied ones under each of their names."""
    named = dict(module.named_parameters(remove_duplicate=False))
    return named | dict(module.named_buffers(remove_duplicate=False))


def transient_buffers(module: torch.nn.Module) -> Iterator[str]:
    """The names of buffers that are not in the state_dict: modules are a tenth of the names of a state."""
    for path, part in module.named_modules(remove_duplicate=False):
        yield from (f"{path}.{leaf}" if path else leaf for leaf in part._non_persistent_buffers_set)


def verify(gm: GraphModule, before: GraphSnapshot | None = None) -> None:
    """Raises VerificationError when `gm` is malformed or lost metadata. What it writes, `memory/verify.py` checks.

    Abstract values are recomputed for the nodes that are new, or whose arguments changed kind, since `before` (all
    of them without it) and compared with what is recorded.
    """
    abstract = AbstractCalls.of(gm)
    try:
        gm.graph.lint()
    except (RuntimeError, AssertionError) as error:
        raise VerificationError(f"the graph is malformed: {error}") from error
    for node in gm.graph.nodes:
        if node.op in ("output",):
            continue
        if "val" not in node.meta and not (node.op == "get_attr" and any(map(is_control_flow, node.users))):
            raise VerificationError(f"{where(node)} lost its metadata 'val'")
        changed = before is None or not before.unchanged(node)
        if node.op == "call_function" and changed and not is_control_flow(node):  # its graphs are verified themselves
            check_value(node, abstract(node))


def check_value(node: Node, computed: Any) -> None:
    """The recorded abstract value is what the call gives."""
    recorded = val(node)
    if recorded is not computed and kind(recorded) != kind(computed):
        raise VerificationError(
            f"{where(node)} is recorded as {abstract_text(recorded)} but computes {abstract_text(computed)}"
        )


def kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (tuple(map(dim_text, value.shape)), value.dtype, value.device)
    if isinstance(value, (list, tuple)):
        return tuple(kind(item) for item in value)
    if isinstance(value, torch.SymInt):
        return str(value)
    return value
