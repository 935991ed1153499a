"""`graft.compile(…, donate=("cache",))`: a functional program reuses memory that its caller gives away.

    before:  %n = index_put(%cache, [%pos], %k);  …;  return %n
    after:   %n = index_put(%cache, [%pos], %k);  …;  copy_(%cache, %n);  return %cache

The copy is what a program that updates its caller's cache has anyway, and goes the same way: update_state_in_place
makes the update in place where nobody needs the old value, and says who does otherwise. A value that is computed anew
is computed in the donated memory where its op can (memory/write_through.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graft.api.gradients import requiring
from graft.base.errors import DonationRefused, UsageError
from graft.ir.effects import is_mutating, mutated_roots
from graft.ir.nodes import leaves, output_node, placeholders, same_shape, same_sizes, tensor_val
from graft.memory.alias_map import StateRecord
from graft.memory.aliases import Aliases
from graft.memory.write_through import write_through
from graft.memory.writes import owner_of
from graft.passes.library.update_state_in_place import IN_PLACE, THROUGH_VIEW
from graft.passes.report import MatchRecord, TransformRecord

aten = torch.ops.aten
LAST_STEP = "compute_in_place"  # its name in dumps and in the report
DIRECT = ("eager", "cuda_graph")  # backends on which a copy is a kernel of its own


def as_names(donate: Sequence[str]) -> tuple[str, ...]:
    if isinstance(donate, str):
        raise UsageError(f"donate takes names: donate=({donate!r},)")
    return tuple(donate)


def donated_names(names: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """The inputs that are meant: by name, or all in a container of that name."""
    found: list[str] = []
    for name in wanted:
        inside = [n for n in names if n == name or n.startswith((f"{name}.", f"{name}["))]
        if not inside:
            raise UsageError(f"donate names {name!r}, which is no input; inputs are {', '.join(names)}")
        found += inside
    return list(dict.fromkeys(found))


def donate(gm: GraphModule, names: Sequence[str], wanted: Sequence[str]) -> None:
    """Returns results of the captured graph in the memory of the donated inputs. Raises DonationRefused."""
    chosen = donated_names(names, wanted)
    if not chosen:
        return
    nodes = dict(zip(names, placeholders(gm.graph), strict=True))
    for name in wanted:
        if all(tensor_val(nodes[inside]) is None for inside in donated_names(names, [name])):
            raise DonationRefused(name, "it holds no tensor; leave it out")
    donated = {name: nodes[name] for name in chosen if tensor_val(nodes[name]) is not None}
    aliases, end = Aliases(gm.graph), output_node(gm.graph)
    written = mutated_roots(gm.graph)
    for name, node in donated.items():
        if node in written:
            raise DonationRefused(name, "the program writes it itself; leave it out")
        for result in results(gm):
            if aliases.same(result, node):
                raise DonationRefused(name, f"%{result.name}, which is returned, is in its memory and would change")
    for node, result in paired(gm, donated, aliases).items():
        with gm.graph.inserting_before(end):
            copy = gm.graph.call_function(aten.copy_.default, (node, result))
        copy.meta = {key: result.meta[key] for key in ("stack_trace", "nn_module_stack") if key in result.meta}
        copy.meta["val"] = node.meta["val"]
        end.replace_input_with(result, node)
    gm.recompile()


def paired(gm: GraphModule, donated: Mapping[str, Node], aliases: Aliases) -> dict[Node, Node]:
    """Donated input → the result that is to lie in its memory: an update of it, else the first that fits."""
    free = [result for result in dict.fromkeys(results(gm)) if tensor_val(result) is not None]
    found: dict[Node, Node] = {}
    for update in (True, False):
        for node in donated.values():
            fits = (r for r in free if problem(r, node, aliases, free) is None)
            result = next((r for r in fits if not update or node in bases(r)), None) if node not in found else None
            if result is not None:
                found[node] = result
                free.remove(result)
    for name, node in donated.items():
        if node not in found:
            reasons = [f"%{r.name} {why}" for r in free if (why := problem(r, node, aliases, free))]
            raise DonationRefused(name, "no result can lie in its memory: " + ("; ".join(reasons) or "none is left"))
    return found


def results(gm: GraphModule) -> list[Node]:
    return [leaf for leaf in leaves(output_node(gm.graph).args[0]) if isinstance(leaf, Node)]


def bases(result: Node) -> Iterator[Node]:
    """What the result is an update of, step by step."""
    while result.target in IN_PLACE or result.target in THROUGH_VIEW:
        base = result.args[0]
        if not isinstance(base, Node):
            return
        yield base
        result = base


def problem(result: Node, node: Node, aliases: Aliases, others: Sequence[Node]) -> str | None:
    """Why a result cannot be in the memory of an input."""
    if result.op != "call_function":
        return "is an input or state of the program, which is returned itself"
    given, memory = tensor_val(result), tensor_val(node)
    if given is None or memory is None or not same_shape(given, memory) or given.dtype != memory.dtype:
        return "has another shape or dtype"
    if given.device != memory.device or not same_sizes(given.stride(), memory.stride()):
        return "lies in memory in another way"
    if owner_of(result) is not result or is_mutating(result):
        return "is a view, or memory that is written"
    shared = next((other for other in others if other is not result and aliases.same(result, other)), None)
    return f"shares memory with %{shared.name}, which is returned too" if shared is not None else None


def compute_in_place(
    names: Sequence[str], wanted: Sequence[str], backend: str
) -> Callable[[GraphModule], TransformRecord] | None:
    """The last step of the pipeline: what was computed anew is computed in the memory that it is copied to."""
    if not wanted or backend not in ("auto", *DIRECT):
        return None

    def step(gm: GraphModule) -> TransformRecord:
        chosen, before = donated_names(names, wanted), len(gm.graph.nodes)
        inputs = dict(zip(placeholders(gm.graph), names, strict=True))
        made = set(write_through(gm.graph, {node for node, name in inputs.items() if name in chosen}))
        matches = tuple(MatchRecord.at(node, (), (node.name,)) for node in gm.graph.nodes if node.name in made)
        status, reason = ("applied", "") if matches else ("no_match", "updates are in place already, or need a copy")
        counts = {"nodes_before": before, "nodes_after": len(gm.graph.nodes)}
        return TransformRecord(LAST_STEP, "state", status, matches, reason=reason, **counts)

    return step


def refuse_copies(state: Sequence[StateRecord], donated: Sequence[str], missed: Mapping[str, str]) -> None:
    """Raises where an update of donated memory could not be made in place."""
    for record in state:
        if record.input in donated and record.how == "copied back" and record.reason in missed.values():
            raise DonationRefused(record.input, record.reason)


def refuse_gradients(values: Sequence[Any], names: Sequence[str], donated: Sequence[str]) -> None:
    """Raises where donated memory is known to autograd: the result in it would pass for the input of the caller."""
    for name in requiring(values, names):
        if name in donated:
            raise DonationRefused(
                name, "it requires gradients, which the result in its memory does not carry; detach it"
            )
