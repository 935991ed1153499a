"""A story of torch.compile as seven columns of items, and the links by which one is followed through all of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from graft.stages.follow import NO_CALLS, leaf_names, nodes_of
from graft.stages.story import STAGES, ScheduledNode, StageNode, Story
from graft.stages.story_code import KernelRecord
from graft.workbench.stages.kernel_text import kernel_time, lines_text
from graft.workbench.stages.text import SECTIONS, TITLES, lookup_line

LAYER = re.compile(r"\b(\w+)\.(\d+)\b")


@dataclass(frozen=True)
class StageItem:
    """text: beside the name. layer: of the model, by which a column is folded. more: shown on a click. code: source
    to show with it."""

    number: int
    column: int
    graph: str
    name: str
    text: str = ""
    line: str = ""
    layer: str = ""
    more: tuple[tuple[str, str], ...] = ()
    code: str = ""

    def pack(self) -> dict[str, Any]:
        found = {"n": self.number, "c": self.column, "g": self.graph, "name": self.name, "text": self.text}
        rest = {"line": self.line, "layer": self.layer, "more": self.more, "code": self.code}
        return found | {key: value for key, value in rest.items() if value}


@dataclass
class Columns:
    items: list[StageItem] = field(default_factory=list)
    links: set[tuple[int, int]] = field(default_factory=set)

    def add(self, column: int, graph: str, name: str, **facts: Any) -> int:
        self.items.append(StageItem(len(self.items), column, graph, name, **facts))
        return len(self.items) - 1

    def link(self, before: Iterable[int], after: int) -> None:
        self.links |= {(one, after) for one in before}

    def pack(self) -> dict[str, Any]:
        return {"items": [one.pack() for one in self.items], "links": [list(link) for link in sorted(self.links)]}


def columns_of(story: Story) -> Columns:
    """Every graph of the story. An item is linked to what it was made from in the column before."""
    made = Columns()
    stops = (story.dynamo.graphs, story.functional.graphs, story.post_grad.graphs)
    graphs = dict.fromkeys(one.graph for stop in stops for one in stop)
    for graph in graphs:
        parts = [calls_of(nodes_of(stop, graph)) for stop in stops]
        traced = add_nodes(made, 1, graph, parts[0], story)
        functional = add_nodes(made, 2, graph, parts[1], story)
        last = add_nodes(made, 3, graph, parts[2], story)
        link_traced(made, parts[0], parts[1], traced, functional)
        link_passes(made, parts, traced, functional, last)
        kernels = add_kernels(made, story, graph, last, add_scheduled(made, story, graph, last))
        add_ends(made, story, graph, kernels)
    return made


def calls_of(nodes: Sequence[StageNode]) -> list[StageNode]:
    return [node for node in nodes if node.op not in NO_CALLS]


def add_nodes(made: Columns, column: int, graph: str, nodes: Sequence[StageNode], story: Story) -> dict[str, int]:
    found = {}
    for node in nodes:
        facts = (("op", node.op), ("type", node.type), ("module", node.module), ("taken apart from", node.original))
        more = tuple((key, value) for key, value in facts if value)
        code = story.dynamo.lines.get(node.line, "")
        found[node.name] = made.add(
            column, graph, f"%{node.name}", text=node.op, line=node.line, layer=layer_of(node.module), more=more,
            code=code if column == 1 else "",
        )  # fmt: skip
    return found


def layer_of(module: str) -> str:
    """`layers.3` of `model.layers.3.mlp`."""
    found = LAYER.search(module)
    return f"{found[1]}.{found[2]}" if found else ""


def link_traced(
    made: Columns,
    traced: Sequence[StageNode],
    functional: Sequence[StageNode],
    before: dict[str, int],
    after: dict[str, int],
) -> None:
    """As `comes_from` has it: a write at the end of a graph knows its line alone."""
    by_line: dict[str, list[int]] = {}
    for one in traced:
        by_line.setdefault(one.line, []).append(before[one.name])
    for node in functional:
        known = [before[name] for name in node.sources if name in before]
        made.link(known if node.sources else by_line.get(node.line, ()) if node.line else (), after[node.name])


def link_passes(
    made: Columns,
    parts: Sequence[Sequence[StageNode]],
    traced: dict[str, int],
    functional: dict[str, int],
    last: dict[str, int],
) -> None:
    """Passes keep names. What they put in was made from what it has a source with and that is gone; else it is
    linked to its source itself."""
    gone = [node for node in parts[1] if node.name not in last]
    for node in parts[2]:
        if node.name in functional:
            made.link([functional[node.name]], last[node.name])
            continue
        replaced = [functional[one.name] for one in gone if set(one.sources) & set(node.sources)]
        made.link(replaced or [traced[name] for name in node.sources if name in traced], last[node.name])


def add_scheduled(made: Columns, story: Story, graph: str, last: dict[str, int]) -> dict[int, ScheduledNode]:
    found = {}
    for node in story.scheduling.nodes:
        if node.graph != graph:
            continue
        refused = [f"{r.first} and {r.second}: {r.reason}" for r in story.scheduling.refusals if is_about(r, node)]
        facts = [("kind", node.kind), ("loops", node.loops or "none: a call"), ("layout", node.layout)]
        facts += [("reads", ", ".join(node.reads)), ("writes", ", ".join(node.writes)), ("group", node.group)]
        facts += [("not fused", text) for text in refused[:8]]
        facts += [("copy", c.reason) for c in story.scheduling.copies if c.graph == graph and c.node in node.nodes]
        fused = f"{node.kind} in {node.group}" if node.group != node.name else node.kind
        number = made.add(4, graph, node.name, text=fused, more=tuple(facts))
        made.link((last[name] for name in node.nodes if name in last), number)
        found[number] = node
    return found


def is_about(refusal: Any, node: ScheduledNode) -> bool:
    return refusal.graph == node.graph and node.name in (*leaf_names(refusal.first), *leaf_names(refusal.second))


def add_kernels(
    made: Columns, story: Story, graph: str, last: dict[str, int], scheduled: dict[int, ScheduledNode]
) -> list[int]:
    found = []
    for kernel in story.kernels.kernels:
        if kernel.graph != graph:
            continue
        number = made.add(
            5, graph, kernel.name, text=f"{kernel.language}{kernel_time(kernel)}", more=tuple(kernel_facts(kernel)),
            line=lines_text(kernel), code=kernel.source,
        )  # fmt: skip
        made.link((last[name] for name in kernel.nodes if name in last), number)
        nodes = set(kernel.nodes)
        made.link((one for one, node in scheduled.items() if node.nodes and set(node.nodes) <= nodes), number)
        found.append(number)
    return found


def kernel_facts(kernel: KernelRecord) -> Iterator[tuple[str, str]]:
    yield "language", kernel.language
    yield "launches", f"{kernel.launches}{f' with {kernel.shapes} shapes' if kernel.shapes > 1 else ''}"
    if kernel.lines:
        yield "lines", ", ".join(kernel.lines)
    between = f", readings from {kernel.us_range[0]} to {kernel.us_range[-1]}" if kernel.us_range else ""
    each = "one launch on average" if kernel.shapes > 1 else "one launch"
    timed = [(each, f"{kernel.us} µs{between}")] if kernel.us else [("not timed", kernel.not_timed)]
    yield from (fact for fact in (*timed, ("tile", kernel.tile)) if fact[1])
    if kernel.registers is not None:
        yield "registers", f"{kernel.registers}, {kernel.spills or 0} spilled, {kernel.shared or 0} bytes shared"
    if kernel.nodes:
        yield "computes", ", ".join(f"%{name}" for name in kernel.nodes)


def add_ends(made: Columns, story: Story, graph: str, kernels: Sequence[int]) -> None:
    """What is known of a whole graph: how it runs, and what the caches did with it."""
    records = [one for one in story.runtime.cudagraphs if one.graph == graph]
    runs = [(f"CUDA graph {'recorded' if one.recorded else 'skipped'}", one.reason) for one in records]
    if graph in story.runtime.allocations:
        reused = story.runtime.reused.get(graph, 0)
        runs.append((f"{story.runtime.allocations[graph]} buffers", f"{reused} in reused memory"))
    ran = [made.add(6, graph, name, text=text) for name, text in runs]
    for number in ran:
        made.link(kernels, number)
    fresh = story.caches.fresh.lookups if story.caches.fresh else ()
    times = (("", story.caches.lookups), (", again", story.caches.again), (", in a fresh process", fresh))
    for word, lookups in times:
        for one in lookups:
            if one.graph == graph:
                more = tuple((name, text) for name, text in one.components.items())
                made.link(ran or kernels, made.add(7, graph, f"{one.cache}{word}", text=lookup_text(one), more=more))


def lookup_text(one: Any) -> str:
    return lookup_line(one).partition(": ")[2]


def stage_facts(story: Story) -> list[dict[str, Any]]:
    """Title and lines of each stage, as `graft stages` prints them."""
    found = []
    for number, name in enumerate(STAGES, 1):
        problem = getattr(story, name).problem
        lines = ([problem] if problem else []) + SECTIONS[name](story)
        found.append({"number": number, "title": TITLES[number - 1], "lines": [line.strip() for line in lines]})
    return found
