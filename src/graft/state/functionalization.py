"""Mutating calls back into Inductor's functional graph, where that is proven to be right.

What runs when, in torch 2.11 and 2.13 (torch/_inductor/fx_passes/{joint_graph,post_grad}.py), for inference:

1. `joint_custom_pre_pass`: here it is noted what shares memory, on the graph as AOTAutograd made it.
2. `remove_noop_ops` (once more in 4) removes clones: of a view, of a value written later, between two outputs.
   That is right as long as the graph is functional and nobody outside sees what shares memory.
3. `reorder_for_locality` moves pure reads down to their users, past functional calls that are to write in place.
   A stacked cache written layer by layer then has readers of the old value behind every write, and each write clones
   the whole cache. It runs before every post-grad hook, so its work is undone afterwards.
4. `post_grad_custom_pre_pass`, left to others, and Inductor's own patterns.
5. `post_grad_custom_post_pass`: **the fix runs here**, where no pass removes a clone any more.
6. `reinplace_inplaceable_ops` makes `index_put` and scatters write in place. It writes into a graph input as soon as
   some `copy_` at the end overwrites that input, although the result may still be returned (wrong values), and never
   asks whether the call reads what it overwrites (`x[1:] = x[:-1].clone()`, wrong values).
7. `decompose_auto_functionalized` turns the functional calls that are left into clones and the mutating op.

So all faults of the graph, for custom and for ATen ops, are mended in one place, 5. One of the schedule is left, in
2.11 alone: see `keep_order`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._guards import TracingContext
from torch._higher_order_ops.auto_functionalize import (
    AsStridedViewInfo,
    SliceViewInfo,
    get_mutable_args,
    read_view_information_from_args,
)
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.virtualized import V
from torch.fx import Graph, Node
from torch.utils._ordered_set import OrderedSet

from graft.graph.edit import abstract_call
from graft.graph.nodes import OpOverload, is_op, leaves, output_node, static_int, tensor_of, val
from graft.state.aliases import Aliases, refresh_views
from graft.state.guards import drop_self_copies, guard_write_backs, guard_writes, is_inplaceable, make_room
from graft.state.outputs import Outputs, keep_outputs_apart, mend_removed_clones, output_groups
from graft.state.report import FunctionalizationReport
from graft.state.restore import restore
from graft.state.work import FUNCTIONAL, FunctionalCall, View, Work, functional_results

aten = torch.ops.aten
V1, V2 = FUNCTIONAL
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
GROUPS, START = "graft_output_groups", "graft_start"

# At module level: AOTInductor deep-copies pass objects, so a list on the object would stay empty.
_REPORTS: list[FunctionalizationReport] = []


def fix_functionalization(graph: Graph) -> FunctionalizationReport:
    """Rewrites Inductor's post-grad graph, before its own reinplacing. Forward: above the call at hand the graph
    writes in place already, below it is functional still, so that pure reads may move up to it."""
    mend_offsets(graph)
    refresh_views(graph.nodes)  # remove_noop_ops exchanged sources without telling the views of them
    work = Work(graph, Aliases(graph, trusted=True), settle)
    outputs = outputs_in_eager(graph)
    mend_removed_clones(work, outputs)
    known = {node for node in output_node(graph).all_input_nodes if work.aliases.inputs(node)}
    homes: dict[Node, Node] = {}
    for node in list(graph.nodes):
        if is_op(node, *FUNCTIONAL):
            call = read_call(node)
            if isinstance(call, str):
                work.left.append((node.name, call))
            else:
                restore(work, call)
        elif is_inplaceable(node):
            make_room(work, homes, node)
    drop_self_copies(work)
    homes = guard_writes(work)
    keep_outputs_apart(work, homes, outputs, known)
    guard_write_backs(work, homes)
    return work.report()


def settle(value: Any) -> Any:
    """The value itself. While Inductor lowers, whoever reads its memory so far is computed here, above the write.

    Inductor's call of a mutating op does that too, but after it took its own place in the schedule: `v = x.sin();
    op(x); return v` computes v from what op left (2.11, 2.13). `reorder_for_locality` hides it, for the price of a
    clone, by moving the read below the op.
    """
    if isinstance(value, torch.Tensor):
        return value
    value.realize()
    for reader in list(V.graph.name_to_users.get(value.get_name(), ())):
        reader.realize()
    return value


# the first for alias_sources, the second makes Inductor call it with what it lowers
vars(settle).update(returns_argument=True, _inductor_lowering_function=True)


def read_call(node: Node) -> FunctionalCall | str:
    """A functional call taken apart, or why it cannot be."""
    op = node.args[0]
    if not isinstance(op, OpOverload):
        return f"{op} is not a plain op"
    if not functional_results(node):
        return "its results are used as a whole"
    names, types = get_mutable_args(op)
    first = max(len(op._schema.returns), 1)  # an op without results gives None
    arguments = dict(node.kwargs)
    if node.target is V1:
        written = [(place, name) for place, name in enumerate(names) if arguments[name] is not None]
        bases = tuple(arguments[name] for _, name in written)
        positions = tuple(first + place for place, _ in written)
        arguments |= {name: View(index) for index, (_, name) in enumerate(written)}
    elif "_all_bases" not in arguments:
        return "an out= op, whose results Inductor allocates"
    else:
        bases = tuple(arguments.pop("_all_bases"))
        positions = tuple(range(first, first + len(bases)))
        recorded = node.meta.get("eager_input_vals")
        traced = recorded[1]["_all_bases"] if recorded is not None else val(node)[first:]
        shift = [moved(base, traced[index]) for index, base in enumerate(bases)]
        if None in shift:
            return "a base starts at another, symbolic place than its views count from"
        views = read_view_information_from_args(names, types, arguments, list(bases))
        arguments |= {name: as_views(view, shift) for name, view in views.items()}
    if not all(isinstance(base, Node) for base in bases):
        return "it writes a list of tensors"
    return FunctionalCall(node, op, arguments, bases, positions, eager_arguments(node, op))


def moved(base: Any, traced: Any) -> int | None:
    """How far a base starts from where the views of it count: remove_noop_ops puts `x[1:]` for `x[1:].clone()`."""
    now, then = tensor_of(base).storage_offset(), traced.storage_offset()
    if str(now) == str(then):
        return 0
    return now - then if static_int(now) is not None and static_int(then) is not None else None


def as_views(info: Any, shift: list[int | None]) -> Any:
    """torch's description of how an argument is a view of its base, as ours."""
    if info is None:
        return None
    if isinstance(info, list):
        return [as_views(item, shift) for item in info]
    if isinstance(info, SliceViewInfo):
        return View(info.base_index, aten.slice.Tensor, (info.dim, info.start, info.end))
    if isinstance(info, AsStridedViewInfo):
        # a symbolic offset is a node, which takes no sum; with one, nothing was moved
        by = shift[info.base_index]
        offset = info.storage_offset + by if by else info.storage_offset
        layout = (list(info.size), list(info.stride), offset)
        return View(info.base_index, aten.as_strided.default, layout)
    return View(info.base_index)


def eager_arguments(node: Node, op: Any) -> dict[str, Any] | None:
    """The abstract arguments that eager saw, by name of the op's schema: Inductor keeps the op's strides to them."""
    recorded = node.meta.get("eager_input_vals")
    if recorded is None:
        return None
    arguments = {name: as_eager(value, recorded[1].get(name)) for name, value in node.kwargs.items()}
    if node.target is V2:
        bases = list(arguments.pop("_all_bases"))
        views = read_view_information_from_args(*get_mutable_args(op), arguments, bases)

        def rebuilt(info: Any) -> Any:
            if isinstance(info, list):
                return [rebuilt(item) for item in info]
            return None if info is None else info.regenerate_view(bases)

        arguments |= {name: rebuilt(info) for name, info in views.items()}
    return arguments


def as_eager(value: Any, recorded: Any) -> Any:
    """The arguments of a node with eager's abstract tensors for its inputs; literals are not recorded, but ours."""
    if isinstance(value, Node):
        return val(value) if recorded is None else recorded
    if isinstance(value, (list, tuple)):
        parts = recorded if recorded is not None else [None] * len(value)
        return [as_eager(item, part) for item, part in zip(value, parts, strict=True)]
    return value


def outputs_in_eager(graph: Graph) -> Outputs:
    """How AOTAutograd saw eager's results lie in memory; nothing for a graph that it does not know (a subgraph)."""
    context = TracingContext.try_get()
    meta = context.fw_metadata if context is not None else None
    count = len(list(leaves(output_node(graph).args[0])))
    groups = output_node(graph).meta.get(GROUPS)
    groups = groups if groups is not None and len(groups) == count else None  # a joint graph was split
    if meta is None or count != meta.num_forward_returns:
        return Outputs(groups=groups)
    first = meta.num_mutated_inp_runtime_indices
    kinds = {first + place: info.output_type.name for place, info in enumerate(meta.output_info)}
    in_inputs = {place for place, kind in kinds.items() if kind in ("is_input", "alias_of_input")}
    return Outputs(frozenset(set(range(count)) - in_inputs), groups)


def record_memory(graph: Graph) -> None:
    """Notes what remove_noop_ops forgets: which outputs share memory (`return v, v.clone()` becomes one value), and
    where the source of an `as_strided` starts (`x[1:].clone()` becomes `x[1:]`, which starts elsewhere)."""
    output_node(graph).meta[GROUPS] = output_groups(graph)
    for node in graph.find_nodes(op="call_function", target=aten.as_strided.default):
        node.meta[START] = val(node.args[0])


def mend_offsets(graph: Graph) -> None:
    """Moves `as_strided` views, which count from the start of a storage, along with their source."""
    for node in graph.find_nodes(op="call_function", target=aten.as_strided.default):
        by = moved(node.args[0], node.meta[START]) if START in node.meta else 0
        if by and len(node.args) > 3 and node.args[3] is not None:
            node.args = (*node.args[:3], node.args[3] + by)
            node.meta["val"] = abstract_call(node)
        node.meta.pop(START, None)


def keep_order(nodes: list[Any]) -> list[Any]:
    """Scheduler nodes, before they are fused, that stay behind the writes and reads they have to stay behind.

    To fuse two loops of different ranges (`[2, 2, 8, 4]` and `[128]`), Inductor's C++ backend computes a node's loops
    anew, and with them what the node reads: before 2.13 it forgets what came from elsewhere, its place after readers
    of the memory that it overwrites (WeakDep, StarDep), and by which name the last writer left a value. The node is
    then moved up freely: `y = x + 1; c[:3].add_(1); c[1:].mul_(2); return y, c[:3] * c[1:]` multiplies too early.
    """
    for node in (leaf for group in nodes for leaf in group.get_nodes()):
        anew = getattr(node, "recompute_size_and_body", None)
        if anew is not None:  # a loop, not a call of a library
            node.recompute_size_and_body = partial(recompute_in_order, node, anew)
    return nodes


def recompute_in_order(node: Any, anew: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    from torch._inductor.dependencies import StarDep, WeakDep  # Inductor's own part, not needed before it runs

    added = OrderedSet(dep for dep in node.read_writes.reads if isinstance(dep, (WeakDep, StarDep)))
    anew(*args, **kwargs)
    node.set_read_writes(node.read_writes.with_read(added).rename(node.mutation_renames))


class SourcePass(CustomGraphPass):
    """A pass that depends on graft's source alone. One object a hook, because torch 2.11 takes no list."""

    def uuid(self) -> bytes:
        """Inductor keys its caches by this: another source or another torch compiles anew."""
        here = Path(__file__).parent
        sources = (*sorted(here.glob("*.py")), *(here.parent / "graph" / name for name in ("nodes.py", "edit.py")))
        return get_hash_for_files(tuple(str(path) for path in sources), torch.__version__)


class RecordMemory(SourcePass):
    def __call__(self, graph: Graph) -> None:
        record_memory(graph)


class FixFunctionalization(SourcePass):
    def __call__(self, graph: Graph) -> None:
        _REPORTS.append(fix_functionalization(graph))


class KeepOrder(SourcePass):
    def __call__(self, graph: Any) -> Any:  # scheduler nodes, in and out
        return keep_order(graph)


def inductor_options() -> dict[str, Any]:
    """What `torch.compile(fn, options=…)` needs for the fix."""
    options = {"joint_custom_pre_pass": RecordMemory(), "post_grad_custom_post_pass": FixFunctionalization()}
    return options | ({"_pre_fusion_custom_pass": KeepOrder()} if VERSION < (2, 13) else {})


def reports() -> list[FunctionalizationReport]:
    """The reports of all graphs compiled since the last call; a hit in Inductor's cache runs no pass, adds none."""
    drained = list(_REPORTS)
    _REPORTS.clear()
    return drained
