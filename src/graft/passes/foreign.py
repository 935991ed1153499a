"""Passes of others as transforms: a callable on an FX graph, an Inductor PatternMatcherPass or CustomGraphPass.

    graft.as_transform("fold_scale", my_pass)         # then config={"transforms": {"fold_scale": {"stage": "fuse"}}}

The pass changes the graph as it likes; what it did is read off the graph afterwards, and each connected change is a
match. So it is dumped, diffed, checked, recorded and rolled back like any other transform.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

from torch.fx import Graph, GraphModule, Node

from graft.base.errors import ForeignPassError
from graft.ir.canonical.normal_form import drop_dead
from graft.ir.edit import INHERITED, AbstractCalls, attribute
from graft.ir.nodes import OpOverload, changed_leaves, leaves
from graft.ir.verify import GraphSnapshot
from graft.passes.accounting import check_weights
from graft.passes.base import BaseTransform, Context, Outcome
from graft.passes.registry import TransformRegistry
from graft.passes.report import MatchRecord

Takes = Literal["graph", "module"]
MODULE_NAMES = ("gm", "graph_module", "module", "model")
_names: dict[
    int, tuple[Any, str]
] = {}  # id of a pass → the pass, which is held so that its id stays its own, and name


class ForeignPass(BaseTransform):
    """A pass that knows nothing of graft. Its graph before and after is whatever it does."""

    reads_decomposed = True
    run: ClassVar[Callable[[Any], Any]]
    takes: ClassVar[Takes]

    def apply(self, gm: GraphModule, context: Context) -> Outcome:
        before = GraphSnapshot.take(gm)
        result = type(self).run(gm if self.takes == "module" else gm.graph)
        other = getattr(result, "graph_module", result)  # of a PassResult
        if isinstance(other, GraphModule) and other is not gm:
            raise ForeignPassError(
                self.name, "it returns another graph module, and has to change the one it is given"
            )
        if isinstance(result, Graph) and result is not gm.graph:
            raise ForeignPassError(self.name, "it returns another graph, and has to change the one it is given")
        check_weights(gm, before, measured=False)
        drop_dead(gm)
        changes = Changes(gm, before, self.name)
        matches = changes.matches()
        return Outcome(matches, reason="" if matches else "the pass changed nothing")


def as_transform(name: str, run: Any, *, takes: Takes | None = None) -> type[BaseTransform]:
    """Registers a pass under `name`; a configuration lists it with its stage.

    takes: what it is called with, a Graph or its GraphModule; left out, its first parameter says so (`gm`, or its
    annotation), and else it is a Graph.
    """
    call = run.apply if hasattr(run, "patterns") and hasattr(run, "apply") else run  # a PatternMatcherPass
    if not callable(call):
        raise ForeignPassError(name, f"{run!r} cannot be called; give a function of a graph, or an object with apply")
    origin = run if inspect.isfunction(run) else type(run)
    body = {"run": staticmethod(call), "takes": takes or what_it_takes(call), "__module__": origin.__module__}
    made = type(f"Foreign_{name}", (ForeignPass,), {**body, "__doc__": inspect.getdoc(run)})
    _names[id(run)] = run, name
    return TransformRegistry.register(name)(made)


def name_of_pass(run: Any) -> str:
    """A transform's own name, the one under which a pass is a transform, or one that is free."""
    if isinstance(run, str):
        return run
    if id(run) in _names:
        return _names[id(run)][1]
    stem = getattr(run, "__name__", type(run).__name__).strip("<>")
    taken, name, count = TransformRegistry.names(), stem, 1
    while name in taken:
        count += 1
        name = f"{stem}_{count}"
    return name


@contextmanager
def tried(run: Any) -> Iterator[str]:
    """Within it, a pass that is no transform is one, under this name."""
    name = name_of_pass(run)
    if isinstance(run, str) or id(run) in _names:
        yield name
        return
    as_transform(name, run)
    try:
        yield name
    finally:
        TransformRegistry.forget(name)
        del _names[id(run)]


def what_it_takes(call: Callable[..., Any]) -> Takes:
    parameters = list(inspect.signature(call).parameters.values())
    if not parameters:
        raise ForeignPassError(getattr(call, "__name__", repr(call)), "it takes no graph")
    first = parameters[0]
    annotated = getattr(first.annotation, "__name__", str(first.annotation))
    return "module" if annotated.endswith("GraphModule") or first.name in MODULE_NAMES else "graph"


class Changes:
    """What a pass did to a graph: nodes that went and came, and what is read in place of what."""

    def __init__(self, gm: GraphModule, before: GraphSnapshot, made_by: str) -> None:
        self.gm, self.before, self.made_by = gm, before, made_by
        self.old = {name: node for node, name, *_ in before.nodes}
        self.abstract = AbstractCalls.of(gm)
        self.pairs: dict[str, str] = {}  # old node → the node that its readers read now
        while (node := next(filter(self.unexplained, list(gm.graph.nodes)), None)) is not None:
            self.make_anew(node)
        for node in gm.graph.nodes:
            self.unexplained(node)

    def unexplained(self, node: Node) -> bool:
        """Whether it calls something else, or reads what took nobody's place."""
        if self.old.get(node.name) is not node or self.before.unchanged(node):
            return False
        target, args, kwargs = self.before.calls[node.name]
        changed = changed_leaves((args, kwargs), (node.args, node.kwargs))
        if node.target is not target or changed is None:
            return True
        moved: dict[str, str] = {}
        for one, other in changed:
            if not (isinstance(one, Node) and isinstance(other, Node)):
                return True
            if any(self.old.get(user.name) is user for user in one.users):  # some read the old one still
                return True
            if {**self.pairs, **moved}.get(one.name, other.name) != other.name:
                return True
            moved[one.name] = other.name
        self.pairs |= moved
        return False

    def make_anew(self, node: Node) -> None:
        """A node that was changed as another one, so that old and new can be told apart."""
        if node.op != "call_function":
            raise ForeignPassError(self.made_by, f"it changes %{node.name}, which is {node.op}")
        graph: Graph = self.gm.graph
        with graph.inserting_before(node):
            new = graph.create_node(node.op, node.target, node.args, node.kwargs)
        new.meta = {key: node.meta[key] for key in INHERITED if key in node.meta}
        node.replace_all_uses_with(new)
        graph.erase_node(node)

    def matches(self) -> tuple[MatchRecord, ...]:
        present = {node.name for node in self.gm.graph.nodes if self.old.get(node.name) is node}
        # relu(relu(x)) became the inner one: it is part of what was replaced, or nothing would say why that is right
        kept = {n for n in self.pairs.values() if n in present and self.old[n].op == "call_function"}
        gone = [name for name in self.old if name not in present or name in self.pairs or name in kept]
        made = [node for node in self.gm.graph.nodes if self.old.get(node.name) is not node]
        groups = Groups((*gone, *(node.name for node in made)))
        for name in gone:
            groups.join(name, (n.name for n in leaves(self.before.calls[name][1:]) if isinstance(n, Node)))
        for node in made:
            groups.join(node.name, (source.name for source in node.all_input_nodes))
        for one, other in self.pairs.items():
            groups.join(one, [other])
        records = []
        for members in groups.all():
            replaced = tuple(name for name in gone if name in members)
            if not replaced:
                raise ForeignPassError(self.made_by, f"it adds %{sorted(members)[0]}, which nothing is replaced by")
            records.append(self.record(replaced, [node for node in made if node.name in members]))
        return tuple(records)

    def record(self, replaced: tuple[str, ...], made: list[Node]) -> MatchRecord:
        like = self.old[replaced[-1]]
        for node in made:
            self.adopt(node, like)
        successors = tuple((old, new) for old, new in self.pairs.items() if old in replaced)
        names = tuple(node.name for node in made)
        return MatchRecord.at(like, replaced, names, self.made_by, successors=successors)

    def adopt(self, node: Node, like: Node) -> None:
        """Gives a node what graft's own edits give it."""
        if node.op == "call_function" and not isinstance(node.target, OpOverload) and not is_plain(node.target):
            raise ForeignPassError(
                self.made_by,
                f"%{node.name} calls {node.target}, which is no overload of an op; write torch.ops.aten.….default",
            )
        node.meta = {key: like.meta[key] for key in INHERITED if key in like.meta} | node.meta
        node.meta["made_by"] = self.made_by
        if node.op == "get_attr":
            node.meta["val"] = self.abstract.state(attribute(self.gm, str(node.target)), like)
        elif node.op == "call_function":
            node.meta["val"] = self.abstract(node)
        else:
            raise ForeignPassError(self.made_by, f"it adds %{node.name}, which is {node.op}")


def is_plain(target: Any) -> bool:
    """getitem and arithmetic on sizes."""
    return getattr(target, "__module__", "") in ("_operator", "operator", "math")


class Groups:
    """Names that belong together."""

    def __init__(self, names: Iterable[str]) -> None:
        self.of: dict[str, set[str]] = {name: {name} for name in names}

    def join(self, name: str, others: Iterable[str]) -> None:
        for other in others:
            if name in self.of and other in self.of and self.of[name] is not self.of[other]:
                self.of[name] |= self.of[other]
                for member in self.of[other]:
                    self.of[member] = self.of[name]

    def all(self) -> list[set[str]]:
        return list({id(members): members for members in self.of.values()}.values())
