"""The normal form that graphs and patterns share.

    before:  %t = aten.to.dtype(%x, torch.float32)                after:  (gone, where x is float32)
             %s = aten.slice.Tensor(%h, 3, 4, 9223372036854775807)        aten.slice.Tensor(%h, -1, 4, 8)
             %v = aten.view.default(%q, [%b, %s, -1, 8])                  aten.reshape.default(%q, [%b, %s, 4, 8])
             %c = aten.chunk.default(%gu, 2, -1); %g = getitem(%c, 0)     aten.slice.Tensor(%gu, -1, 0, 64)

What a graph computes stays the same bit for bit (save that `-0.0 + 0` keeps its sign). The pass set is
idempotent: canonicalizing twice gives the same text.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from graft.ir.canonical import rules, shortcuts
from graft.ir.checks import checked_numbers, drop_proven_checks
from graft.ir.effects import (
    alias_sources,
    is_maybe_view,
    is_mutating,
    mutated_args,
    mutated_roots,
    storage_root,
    written_value,
)
from graft.ir.nodes import (
    OpOverload,
    arg_values,
    leaves,
    outlives_call,
    output_node,
    placeholders,
    same_sizes,
    tensor_of,
    tensor_val,
    val,
)
from graft.ir.storage import share_storage

aten = torch.ops.aten
RATES = frozenset({"dropout_p", "dropout", "p"})  # how arguments are named by which an op drops elements
MODES = ("train", "training")
SAMPLES = "advances_generator"  # in the meta of a call that the program makes for that alone


def canonicalize(gm: GraphModule) -> None:
    """Brings the graph into normal form, in place. The caller recompiles when the module is to be run."""
    inline_grad_regions(gm)
    drop_proven_checks(gm.graph)
    drop_self_copies(gm.graph)
    while sweep(gm.graph):
        pass
    merge_equal(gm.graph)
    drop_dead(gm, captured=True)


def inline_grad_regions(gm: GraphModule) -> None:
    """`wrap_with_set_grad_enabled(flag, submodule, *args)` becomes the submodule's nodes; inference has no grad."""
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and getattr(node.target, "__name__", "") == "wrap_with_set_grad_enabled":
            body_attr, *inputs = node.args[1:]
            body = gm.get_submodule(str(body_attr.target))
            inline_grad_regions(body)
            with gm.graph.inserting_before(node):
                environment = dict(zip(placeholders(body.graph), inputs, strict=True))
                outputs = gm.graph.graph_copy(body.graph, environment)
            replace_outputs(gm.graph, node, outputs)
            gm.graph.erase_node(node)
            if not body_attr.users:
                gm.graph.erase_node(body_attr)


def replace_outputs(graph: Graph, node: Node, outputs: Any) -> None:
    """Points the readers of a multi-output call at the inlined results."""
    if isinstance(outputs, Node):
        node.replace_all_uses_with(outputs)
        return
    for user in list(node.users):
        if user.target is not operator.getitem:
            raise AssertionError(f"{user} reads the tuple {node} as a whole")
        user.replace_all_uses_with(outputs[user.args[1]])
        graph.erase_node(user)


def drop_self_copies(graph: Graph) -> None:
    """`copy_(%n, %add_)` after `%add_ = add_(%n, 1)`: export writes back what is written already."""
    for node in [node for node in graph.nodes if node.target is aten.copy_.default]:
        into, source = node.args[:2]
        if written_value(source) is written_value(into):
            node.replace_all_uses_with(into)
            graph.erase_node(node)


def sweep(graph: Graph) -> bool:
    """One pass of the rules in graph order; True when anything changed."""
    changed = False
    mutated, returned = mutated_roots(graph), returned_roots(graph)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        before = (node.target, node.args, node.kwargs)
        if isinstance(node.target, OpOverload):
            rules.normalize_arguments(node)
        rules.respell(node, mutated)
        same = shortcuts.shortcut(node)
        if same is not None and stays_fresh(node, same, returned) and may_share(node, same, mutated):
            if node in returned:
                returned.add(storage_root(same))
            node.replace_all_uses_with(same)
            graph.erase_node(node)
            changed = True
        else:
            changed |= (node.target, node.args, node.kwargs) != before
    return changed


def stays_fresh(node: Node, same: Node, returned: set[Node]) -> bool:
    """A fresh result that is returned stays so: what takes its place lies alike and is nobody else's."""
    if node not in returned or alias_sources(node):
        return True
    root = storage_root(same)
    alike = same_sizes(tensor_of(node).stride(), tensor_of(same).stride())
    return alike and not outlives_call(root) and root not in returned


def returned_roots(graph: Graph) -> set[Node]:
    """Storage owners that the graph returns, directly or as views."""
    return {storage_root(leaf) for leaf in leaves(output_node(graph).args) if isinstance(leaf, Node)}


def returned_copies(graph: Graph) -> set[Node]:
    """Calls that may give a view and give a copy here (`reshape`), which the graph returns, directly or as views."""
    found, waiting = set(), [leaf for leaf in leaves(output_node(graph).args) if isinstance(leaf, Node)]
    while waiting:
        node = waiting.pop()
        sources = alias_sources(node)
        waiting += sources
        if sources and is_maybe_view(node) and not share_memory(node, sources[0]):
            found.add(node)
    return found


def share_memory(node: Node, source: Node) -> bool:
    one, other = tensor_val(node), tensor_val(source)
    return one is None or other is None or share_storage(one, other)


def may_share(node: Node, same: Node, mutated: set[Node]) -> bool:
    """A result may become its input unless someone writes to either of them later."""
    return not mutated or not ({storage_root(node), storage_root(same)} & mutated)


def merge_equal(graph: Graph) -> None:
    """Common subexpressions: the second of two equal pure calls becomes the first. Symbolic ints merge by value."""
    mutated, returned, checked = mutated_roots(graph), returned_roots(graph), checked_numbers(graph)
    copied = returned_copies(graph)
    first: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if node.target is aten.mul.Tensor:
            rules.as_square(node)  # its factors may have become one
        key = expression(node, mutated)
        if key is None:
            continue
        seen = first.setdefault(key, node)
        apart = (node in returned and seen in returned) or (node in copied and seen in copied)
        if seen is not node and node not in checked and not apart:
            node.replace_all_uses_with(seen)
            graph.erase_node(node)


def expression(node: Node, mutated: set[Node]) -> Any:
    """A hashable key of what a node computes, or None when it must stay as it is."""
    if node.op == "get_attr":
        return ("get_attr", node.target) if node not in mutated else None
    if node.op != "call_function":
        return None
    if isinstance(val(node), torch.SymInt):
        return ("symint", str(val(node)))
    if is_mutating(node) or is_random(node) or tensor_val(node) is None:
        return None
    if mutated and (storage_root(node) in mutated or any(storage_root(a) in mutated for a in node.all_input_nodes)):
        return None
    return (node.target, hashable(node.args), hashable(node.kwargs))


def is_random(node: Node) -> bool:
    """Whether it samples: the op may, and neither its rate of dropout nor its mode says that it does not."""
    if not isinstance(node.target, OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    values = {argument.name: value for argument, value in arg_values(node)}
    rates = RATES if node.target._schema.name.endswith("dropout") else RATES - {"p"}
    still = any(isinstance(rate := values.get(name), (int, float)) and rate == 0 for name in rates)
    return not still and not any(values.get(name, True) is False for name in MODES)


def hashable(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(hashable(item) for item in value)
    if isinstance(value, dict):
        return tuple(sorted((key, hashable(item)) for key, item in value.items()))
    return (type(value).__name__, repr(value)) if isinstance(value, (bool, int, float)) else value  # -0.0 is not 0.0


def drop_dead(gm: GraphModule, *, captured: bool = False) -> None:
    """Erases what nothing reads: pure calls and attributes. Writes, outputs and inputs stay.

    `captured`: the graph is the program's own, whose unread samples stay as well: they advance a generator.
    """
    for node in reversed(list(gm.graph.nodes)):
        if node.users:
            continue
        if captured and is_random(node):
            node.meta[SAMPLES] = True
        dead_call = node.op == "call_function" and not is_mutating(node) and not is_effect(node)
        if (dead_call or node.op == "get_attr" or dead_write(node)) and SAMPLES not in node.meta:
            gm.graph.erase_node(node)


def drop_unused_state(gm: GraphModule) -> None:
    """Takes away parameters, buffers and submodules that no node reads."""
    used = {str(node.target) for node in gm.graph.nodes if node.op in ("get_attr", "call_module")}
    graphs = {name for name in used if isinstance(module_at(gm, name), GraphModule)}
    for owner_name, owner in list(gm.named_modules()):
        if any(f"{owner_name}.".startswith(f"{name}.") for name in graphs):
            continue  # the graphs that control flow calls, with all that they hold
        for leaf in [*owner._parameters, *owner._buffers]:
            if f"{owner_name}.{leaf}".lstrip(".") not in used:
                delattr(owner, leaf)
    for name in [name for name, _ in gm.named_modules() if name]:
        inside = any(f"{name}.".startswith(f"{graph}.") for graph in graphs)
        holds = any(f"{target}.".startswith(f"{name}.") for target in used)
        if not inside and not holds:
            gm.delete_submodule(name)


def module_at(gm: GraphModule, name: str) -> Any:
    """The submodule of that name, or None where it is none."""
    found: Any = gm
    for part in name.split("."):
        found = found._modules.get(part) if isinstance(found, torch.nn.Module) else None
    return found


def dead_write(node: Node) -> bool:
    """A write into a fresh tensor that nobody reads afterwards (nothing but this node uses the storage)."""
    if node.op != "call_function" or not is_mutating(node):
        return False
    return all(
        (owner := storage_root(arg)).op == "call_function" and owner is arg and set(arg.users) == {node}
        for arg in mutated_args(node)
    )


def is_effect(node: Node) -> bool:
    """A call without tensor result that is kept for what it does (checks of data, prints)."""
    return isinstance(node.target, OpOverload) and not node.target._schema.returns
