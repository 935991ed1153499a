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

from collections.abc import Callable, Sequence
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
from torch.fx.experimental.symbolic_shapes import CallMethodKey, free_unbacked_symbols
from torch.utils._ordered_set import OrderedSet
from torch.utils._pytree import SequenceKey

from graft.ir.edit import abstract_call
from graft.ir.effects import alias_sources
from graft.ir.nodes import OpOverload, is_op, leaves, output_node, tensor_of, val
from graft.memory.aliases import Aliases, refresh_views
from graft.memory.inductor_fix.counters import keep_counters
from graft.memory.inductor_fix.guards import (
    drop_self_copies,
    guard_write_backs,
    guard_writes,
    is_inplaceable,
    make_room,
)
from graft.memory.inductor_fix.moves import lift, lift_plan
from graft.memory.inductor_fix.offsets import IN_INPUT, view_arguments
from graft.memory.inductor_fix.outputs import OutputAliases, keep_outputs_apart, mend_removed_clones, output_groups
from graft.memory.inductor_fix.report import FunctionalizationReport
from graft.memory.inductor_fix.restore import restore
from graft.memory.inductor_fix.work import FUNCTIONAL, FunctionalCall, GraphWork, View, functional_results

aten = torch.ops.aten
V1, V2 = FUNCTIONAL
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
GROUPS, START = "graft_output_groups", "graft_start"

# At module level: AOTInductor deep-copies pass objects, so a list on the object would stay empty.
_REPORTS: list[FunctionalizationReport] = []
# told of every graph, before it (None) and after it (the report), by the key that a pass has
OBSERVERS: dict[str, Callable[[Graph, FunctionalizationReport | None], None]] = {}


def fix_functionalization(graph: Graph) -> FunctionalizationReport:
    """Rewrites Inductor's post-grad graph, before its own reinplacing. Forward: above the call at hand the graph
    writes in place already, below it is functional still, so that pure reads may move up to it."""
    mend_offsets(graph)
    refresh_views(graph.nodes)  # remove_noop_ops exchanged sources without telling the views of them
    answer_offsets(graph)
    work = GraphWork(graph, Aliases(graph, trusted=True), settle, offset_of)
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
                keep_answers(graph)
        elif is_inplaceable(node):
            make_room(work, homes, node)
    mend_offsets(graph)  # of the values that took the place of results
    drop_self_copies(work)
    homes = guard_writes(work)
    keep_outputs_apart(work, homes, outputs, known)
    guard_write_backs(work, homes)
    return work.report()


def settle(value: Any) -> Any:
    """The value itself. While Inductor lowers, whoever reads its memory so far is computed here, above the write.

    Inductor's call of a mutating op does that too, but after it took its own offset_of in the schedule: `v = x.sin();
    op(x); return v` computes v from what op left (2.11, 2.13). `reorder_for_locality` hides it, for the price of a
    clone, by moving the read below the op.
    """
    if isinstance(value, torch.Tensor):
        return value
    value.realize()
    for reader in list(V.graph.name_to_users.get(value.get_name(), ())):
        reader.realize()
    return value


def start_of(tensor: Any) -> Any:
    """Where a tensor starts in its storage.

    Inductor does not lower `aten.sym_storage_offset` (2.11, 2.13): it calls it on an empty tensor in place of a view,
    so the answer is 0 and `op(x[1])` with dynamic sizes writes x[0].
    """
    return tensor.storage_offset() if isinstance(tensor, torch.Tensor) else lowered_number()


def offset_of(number: Any, then: Any, now: Any, dim: int | None = None) -> Any:
    """A number that counts from where `then` starts, as one that counts from where `now` does.

    Both are tensors or numbers. `dim`: it counts steps of that dim of `then`, not elements.
    """
    if not isinstance(then, torch.Tensor) and not isinstance(now, torch.Tensor):
        return lowered_number()
    starts = [value.storage_offset() if isinstance(value, torch.Tensor) else value for value in (then, now)]
    return number + (starts[1] - starts[0]) // (1 if dim is None else then.stride(dim))


def lowered_number() -> Any:
    """The number that the node at hand stands for, while Inductor lowers it."""
    meta = V.graph.current_node.meta
    value = meta["val"].node.expr if isinstance(meta["val"], torch.SymInt) else meta["val"]
    counted = getattr(V.graph, "graph_input_storage_offsets", None) is not None  # by Inductor, since 2.12
    by = 0 if counted else meta.get(IN_INPUT, 0)
    return value - (by.node.expr if isinstance(by, torch.SymInt) else by)


# for alias_sources; makes Inductor call them with what it lowers; for Aliases.is_read
vars(settle).update(returns_argument=True, _inductor_lowering_function=True)
vars(start_of).update(_inductor_lowering_function=True, gives_number=True)
vars(offset_of).update(_inductor_lowering_function=True, gives_number=True)


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
        written = [(nth, name) for nth, name in enumerate(names) if arguments[name] is not None]
        bases = tuple(arguments[name] for _, name in written)
        positions = tuple(first + nth for nth, _ in written)
        arguments |= {name: View(index) for index, (_, name) in enumerate(written)}
    elif "_all_bases" not in arguments:
        return "an out= op, whose results Inductor allocates"
    else:
        bases = tuple(arguments.pop("_all_bases"))
        positions = tuple(range(first, first + len(bases)))
        recorded = node.meta.get("eager_input_vals")
        traced = recorded[1]["_all_bases"] if recorded is not None else val(node)[first:]
        views = read_view_information_from_args(names, types, arguments, list(bases))
        arguments |= {name: as_views(view, traced) for name, view in views.items()}
    if not all(isinstance(base, Node) for base in bases):
        return "it writes a list of tensors"
    found = found_sizes(node, len(op._schema.returns))
    return FunctionalCall(node, op, arguments, bases, positions, eager_arguments(node, op), found)


def found_sizes(node: Node, count: int) -> dict[Any, tuple[Any, ...]]:
    """The sizes of the op's own results that are known when it has run, each with the path to it.

    Inductor asks every op that is not functional for them; without, it takes the sizes of a second look at the op for
    others than those that the graph goes on with.
    """
    known = free_unbacked_symbols([val(argument) for argument in node.all_input_nodes])
    found: dict[Any, tuple[Any, ...]] = {}
    for nth, result in enumerate((val(node) or ())[:count]):
        item = () if count == 1 else (SequenceKey(nth),)
        for dim, size in enumerate(result.shape if isinstance(result, torch.Tensor) else ()):
            symbols = free_unbacked_symbols(size) - known
            if isinstance(size, torch.SymInt) and size.node.expr in symbols:
                found.setdefault(size.node.expr, (*item, CallMethodKey("size"), SequenceKey(dim)))
    return found


def as_views(info: Any, traced: Sequence[Any]) -> Any:
    """torch's description of how an argument is a view of its base, as ours. `traced`: the bases that it counts from,
    which need not be those of the call any more: remove_noop_ops puts `x[1:]` for `x[1:].clone()`."""
    if info is None:
        return None
    if isinstance(info, list):
        return [as_views(item, traced) for item in info]
    base = traced[info.base_index]
    if isinstance(info, SliceViewInfo):
        steps = base.storage_offset() // base.stride(info.dim)
        return View(info.base_index, aten.slice.Tensor, (info.dim, info.start, info.end), steps)
    if isinstance(info, AsStridedViewInfo):
        layout = (list(info.size), list(info.stride), info.storage_offset)
        return View(info.base_index, aten.as_strided.default, layout, base.storage_offset())
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

        def rebuilt(view: Any) -> Any:
            if isinstance(view, list):
                return [rebuilt(item) for item in view]
            return None if view is None else view.of(bases[view.base])

        arguments |= {name: rebuilt(as_views(info, bases)) for name, info in views.items()}
    return arguments


def as_eager(value: Any, recorded: Any) -> Any:
    """The arguments of a node with eager's abstract tensors for its inputs; literals are not recorded, but ours."""
    if isinstance(value, Node):
        return val(value) if recorded is None else recorded
    if isinstance(value, (list, tuple)):
        parts = recorded if recorded is not None else [None] * len(value)
        return [as_eager(item, part) for item, part in zip(value, parts, strict=True)]
    return value


def outputs_in_eager(graph: Graph) -> OutputAliases:
    """How AOTAutograd saw eager's results lie in memory; nothing for a graph that it does not know (a subgraph)."""
    context = TracingContext.try_get()
    meta = context.fw_metadata if context is not None else None
    count = len(list(leaves(output_node(graph).args[0])))
    groups = output_node(graph).meta.get(GROUPS)
    groups = groups if groups is not None and len(groups) == count else None  # a joint graph was split
    if meta is None or count != meta.num_forward_returns:
        return OutputAliases(groups=groups)
    first = meta.num_mutated_inp_runtime_indices
    kinds = {first + nth: info.output_type.name for nth, info in enumerate(meta.output_info)}
    in_inputs = {nth for nth, kind in kinds.items() if kind in ("is_input", "alias_of_input")}
    return OutputAliases(frozenset(set(range(count)) - in_inputs), groups)


def record_memory(graph: Graph) -> None:
    """Notes what remove_noop_ops forgets: which outputs share memory (`return v, v.clone()` becomes one value), and
    where the source of an `as_strided` starts (`x[1:].clone()` becomes `x[1:]`, which starts elsewhere)."""
    output_node(graph).meta[GROUPS] = output_groups(graph)
    for node in graph.find_nodes(op="call_function", target=aten.as_strided.default):
        node.meta[START] = val(node.args[0])


def answer_offsets(graph: Graph) -> None:
    """`sym_storage_offset` as a call that Inductor lowers right, above all writes that might wait for it."""
    for node in graph.find_nodes(op="call_function", target=aten.sym_storage_offset.default):
        node.target = start_of
        plan, _ = lift_plan([node], next(n for n in graph.nodes if n.op != "placeholder"))
        if all(n is node or alias_sources(n) for n in plan):
            lift(plan, next(n for n in graph.nodes if n.op != "placeholder"))
    keep_answers(graph)


def keep_answers(graph: Graph) -> None:
    """Who asked where a view starts gets the answer that it had, although the value may have moved since:
    remove_noop_ops puts `x[1:]` for `x[1:].clone()`, and a value written in place for the result of a call."""
    for node in graph.find_nodes(op="call_function", target=start_of):
        then, now = val(node), abstract_call(node)
        if str(then) != str(now):
            keep_answer(graph, node, then, now)


def keep_answer(graph: Graph, node: Node, then: Any, now: Any) -> None:
    source = node.args[0]
    while str(tensor_of(source).storage_offset()) != str(now - then):
        if not alias_sources(source):
            return
        source = alias_sources(source)[0]
    with graph.inserting_after(node):
        kept = graph.call_function(offset_of, (node, source, 0))
    node.replace_all_uses_with(kept, delete_user_cb=lambda user: user is not kept)
    node.meta["val"], kept.meta["val"] = now, then


def mend_offsets(graph: Graph) -> None:
    """Moves `as_strided` views, which count from the start of a storage, along with their source."""
    for node in graph.find_nodes(op="call_function", target=aten.as_strided.default):
        if START not in node.meta:
            continue
        source, *layout = node.args
        if len(layout) == 3 and layout[2] is not None:
            view = View(0, node.target, tuple(layout), node.meta[START].storage_offset())
            node.args = (source, *view_arguments(offset_of, view, source, source, node))
            node.meta["val"] = abstract_call(node)
        node.meta[START] = val(source)


def keep_order(nodes: list[Any]) -> list[Any]:
    """Scheduler nodes, before they are fused, that stay behind the writes and reads they have to stay behind.

    To fuse two loops of different ranges (`[2, 2, 8, 4]` and `[128]`), Inductor's C++ backend computes a node's loops
    anew, and with them what the node reads: before 2.13 it forgets what came from elsewhere, its position after
    readers of the memory that it overwrites (WeakDep, StarDep), and by which name the last writer left a value. The
    node is then moved up freely: `y = x + 1; c[:3].add_(1); c[1:].mul_(2); return y, c[:3] * c[1:]` multiplies too
    early.
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
        memory = Path(__file__).parents[1]
        sources = (*sorted(memory.rglob("*.py")), *(memory.parent / "ir" / name for name in ("nodes.py", "edit.py")))
        return get_hash_for_files(tuple(str(path) for path in sources), torch.__version__)


class RecordMemory(SourcePass):
    def __call__(self, graph: Graph) -> None:
        keep_counters(graph)
        record_memory(graph)


class FixFunctionalization(SourcePass):
    """`key`: of the observer that is told of each graph; a name, since copies of the pass must find it."""

    def __init__(self, key: str = "") -> None:
        self.key = key

    def __call__(self, graph: Graph) -> None:
        told = OBSERVERS.get(self.key, lambda _graph, _report: None)
        told(graph, None)
        report = fix_functionalization(graph)
        _REPORTS.append(report)
        told(graph, report)


class KeepOrder(SourcePass):
    def __call__(self, graph: Any) -> Any:  # scheduler nodes, in and out
        return keep_order(graph)


def inductor_options(key: str = "") -> dict[str, Any]:
    """What `torch.compile(fn, options=…)` needs for the fix. `key`: see OBSERVERS."""
    options = {"joint_custom_pre_pass": RecordMemory(), "post_grad_custom_post_pass": FixFunctionalization(key)}
    return options | ({"_pre_fusion_custom_pass": KeepOrder()} if VERSION < (2, 13) else {})


def reports() -> list[FunctionalizationReport]:
    """The reports of all graphs compiled since the last call; a hit in Inductor's cache runs no pass, adds none."""
    drained = list(_REPORTS)
    _REPORTS.clear()
    return drained
