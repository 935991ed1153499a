"""All edits are accounted for: what a transform changed is what its matches say, or it is taken back.

The graph is compared with the one before, whatever the transform says of itself. A match owns the nodes that it
replaced and made; whatever else is rewired, added or removed, or a weight that is another one, is an error by name.
Nodes that nobody reads any more follow from a match: they need no word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.fx import GraphModule, Node

from graft.base.errors import VerificationError
from graft.ir.effects import effects
from graft.ir.nodes import changed_leaves, where
from graft.ir.verify import GraphSnapshot, module_state, version
from graft.passes.report import MatchRecord

ADVICE = "let every rewrite have its match (Rewriter and PatternTransform do that by themselves)"


def check_accounted(
    gm: GraphModule, before: GraphSnapshot, records: Sequence[MatchRecord], *, measured: bool = False
) -> None:
    """Raises VerificationError for the first change that no record covers.

    What reads a node that a match made is covered by that match; that it may read it is checked numerically. A node
    that was made anew, as it was and under its name, is the old one: a transform may take back what it tried.
    measured: the graph may have run, which writes its state and puts it back.
    """
    check_weights(gm, before, measured)
    replaced = {name for record in records for name in record.replaced}
    made = {name for record in records for name in record.made}
    owned = replaced | made
    old = set(before.calls)
    new = {node.name for node in gm.graph.nodes}
    said = f"none of its {len(records)} matches says so" if records else "it reports no match"
    step = dict(pair for record in records for pair in record.successors)
    for node in gm.graph.nodes:
        if node.name in old:
            if not before.unchanged(node) and node.name not in owned and rewired(node, before, step, made):
                raise VerificationError(f"{where(node)} was changed, and {said}; {ADVICE}")
        elif not is_owned(node, old, owned):
            raise VerificationError(f"{where(node)} was added, and {said}; {ADVICE}")
    for _, name, op, target, *_ in before.nodes:
        needed = op in ("placeholder", "output") or (op == "call_function" and bool(effects(target).written))
        if needed and name not in new and name not in replaced:
            raise VerificationError(f"%{name} was removed, and {said}; {ADVICE}")
    if not records and list(before.calls) != [node.name for node in gm.graph.nodes]:
        raise VerificationError(f"the order of the graph was changed, and {said}; {ADVICE}")


def check_weights(gm: GraphModule, before: GraphSnapshot, measured: bool) -> None:
    """Parameters and buffers are the same tensors, and nobody wrote into them, but for a run that was measured."""
    current = module_state(gm)
    for name, tensor in before.state.items():
        if name in current and current[name] is not tensor:
            raise VerificationError(
                f"the weight {name} was replaced by another; add one beside it (Editor.parameter)"
            )
        if name in current and not measured and before.versions[name] != version(tensor):
            raise VerificationError(
                f"the weight {name} was written into, and its values are not put back: load the module anew;"
                " transforms leave weights as they are"
            )


def rewired(node: Node, before: GraphSnapshot, step: Mapping[str, str], made: set[str]) -> bool:
    """Whether it calls something else, or reads what did not take the place of what it read."""
    target, args, kwargs = before.calls[node.name]
    changed = changed_leaves((args, kwargs), (node.args, node.kwargs))
    if node.target is not target or changed is None:
        return True
    return not all(follows(one, other, step, made) for one, other in changed)


def follows(one: object, other: object, step: Mapping[str, str], made: set[str]) -> bool:
    """Whether a node took the place of another: it has its name, a match made it, or it is a successor."""
    if not (isinstance(one, Node) and isinstance(other, Node)):
        return False
    return other.name == one.name or other.name in made or leads(step, one.name, other.name)


def leads(step: Mapping[str, str], name: object, wanted: object) -> bool:
    """Whether a node took the place of another, perhaps by way of others."""
    seen = set()
    while isinstance(name, str) and name in step and name not in seen:
        seen.add(name)
        name = step[name]
        if name == wanted:
            return True
    return False


def is_owned(node: Node, old: set[str], owned: set[str]) -> bool:
    """A match made it, or it is there for nodes that a match made."""
    waiting, seen = [node], set()
    while waiting:
        here = waiting.pop()
        if here in seen or here.name in owned:
            continue
        seen.add(here)
        if here.name in old or not here.users:
            return False
        waiting += here.users
    return True
