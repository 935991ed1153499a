"""A story as lines for people, a stage at a time. What is equal but for its number is told once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from graft.stages.story import (
    STAGES,
    CacheLookup,
    CopyRecord,
    DynamoStage,
    FreshProcess,
    GraphBreak,
    GuardGroup,
    Mutation,
    PassRun,
    Recompilation,
    ScheduledNode,
    StageGraph,
    Story,
    SymbolRecord,
)
from graft.stages.story_code import RuntimeStage, ValueRecord
from graft.workbench.diff_text import StyledLine
from graft.workbench.stages.kernel_text import kernel_lines
from graft.workbench.stages.words import FEW, MOST, by_graph, bytes_text, counts, cut, folded, plural

TITLES = (
    "Dynamo",
    "functionalization and decompositions",
    "graph passes",
    "scheduling",
    "kernels",
    "runtime",
    "caches",
)


def story_lines(story: Story, stage: int | None = None) -> list[StyledLine]:
    calls = "; ".join(story.calls[:4]) + (" …" if len(story.calls) > 4 else "")
    head = f"{story.target}  {story.backend}, torch {story.torch}, {story.device}, {story.seconds:.1f} s"
    lines = [StyledLine("title", head), StyledLine("plain", f"  called with {calls or 'nothing'}")]
    lines += [StyledLine("changed", f"  note: {note}") for note in story.notes]
    for number, name in enumerate(STAGES, 1):
        if stage is None or stage == number:
            lines += stage_lines(story, number, name)
    return lines + end_lines(story)


def end_lines(story: Any) -> list[StyledLine]:
    return [] if story.end is None else [StyledLine("removed", str(story.end))]


def stage_lines(story: Story, number: int, name: str) -> list[StyledLine]:
    lines = [StyledLine("head", f"{number} {TITLES[number - 1]}")]
    problem = getattr(story, name).problem
    if problem:
        lines.append(StyledLine("changed", f"  {problem}"))
    told = SECTIONS[name](story)
    if not told and not problem and story.end is not None and 0 < story.end.stage < number:
        told = [f"not reached: the run ended in stage {story.end.stage}"]
    return lines + [StyledLine("plain", f"  {line}") for line in told]


def graph_line(graph: StageGraph) -> str:
    called = [node.op for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    frame = f" {graph.frame}" if graph.frame else ""
    return f"graph {graph.graph}{frame}: {plural(len(called), 'call')}: {counts(Counter(called))}"


def dynamo_lines(story: Story) -> list[str]:
    stage = story.dynamo
    lines = cut(by_graph(map(graph_line, stage.graphs)))
    lines += [f"break at {one.line or 'an unknown line'}{called_from(one)}: {one.reason}" for one in stage.breaks]
    lines += [] if stage.breaks or not stage.graphs else ["no graph breaks"]
    guarded = list(dict.fromkeys(group.graph for group in stage.guards))
    lines += [line for graph in guarded[:FEW] for line in guard_lines(stage, graph)]
    if rest := guarded[FEW:]:
        lines.append(
            f"guards of {plural(len(rest), 'more graph')}: {sum(g.count for g in stage.guards if g.graph in rest)}"
        )
    lines += cut(list(map(recompilation_line, stage.recompilations)))
    lines += cut(list(map(symbol_line, stage.symbols)))
    return [*lines, *stage.notes]


def recompilation_line(one: Recompilation) -> str:
    told = values_told(one)
    values = f" ({told})" if told else ""
    at = f" at {one.line}" if one.line else ""
    return f"{one.graph} recompiled: guard of {one.previous or 'an earlier graph'} failed: {one.guard}{values}{at}"


def symbol_line(one: SymbolRecord) -> str:
    fixed = f", specialised to {one.fixed_to} by {one.fixed_by or 'a guard'}" if one.fixed_to else ""
    return f"{one.graph} {one.symbol} = {one.source} (here {one.value}, {one.range}){fixed}"


def called_from(one: GraphBreak) -> str:
    """` (called from decode.py:8)`: the program's own line, where another function breaks."""
    return f" (called from {', '.join(one.callers)})" if one.callers else ""


def values_told(one: Recompilation) -> str:
    """`expected 2, got 3`."""
    expected = [f"expected {one.expected}"] if one.expected else []
    got = one.actual or ("another value" if expected else "")
    return ", ".join([*expected, *([f"got {got}"] if got else [])])


def guard_lines(stage: DynamoStage, graph: str) -> list[str]:
    """How many, what a check of all costs, the kinds by cost, and the dearest ones."""
    groups = sorted((one for one in stage.guards if one.graph == graph), key=lambda one: (-one.us, -one.count))
    cold, warm = stage.guard_us.get(graph), stage.guard_warm_us.get(graph)
    cost = f", {warm:.1f} µs to check" if warm is not None else ""
    cost += f" ({cold:.0f} with nothing in the cache)" if cold else ""
    kinds = [f"{one.kind}{f' × {one.count}' if one.count > 1 else ''}{microseconds(one)}" for one in groups]
    dear = [f"{one.kind} on {one.on} {one.us:.2f} µs" for one in stage.dearest if one.graph == graph]
    lines = [f"guards of {graph}: {sum(one.count for one in groups)}{cost}: {', '.join(cut(kinds, 6))}"]
    return [*lines, *([f"  dearest: {', '.join(dear[:3])}"] if dear else [])]


def microseconds(group: GuardGroup) -> str:
    """` 0.31 µs`, and of how many, where not all were timed."""
    if not group.timed:
        return ""
    return f" {group.us:.2f} µs" + (f" ({group.timed} timed)" if group.timed < group.count else "")


def functional_lines(story: Story) -> list[str]:
    stage = story.functional
    lines = cut(by_graph(f"functional {graph_line(graph)}" for graph in stage.whole))
    lines += cut(by_graph(f"decomposed {graph_line(graph)}" for graph in stage.graphs))
    apart = [f"{one.op} → {', '.join(one.into)}  × {one.times}" for one in stage.decompositions]
    lines += cut(list(dict.fromkeys(apart)))
    lines += cut(folded(map(mutation_line, stage.mutations)))
    return lines if stage.mutations or not stage.graphs else [*lines, "no writes to inputs"]


def mutation_line(one: Mutation) -> str:
    size = f", {bytes_text(one.copied_bytes)} copied" if one.copied_bytes else ""
    return f"{one.graph} write to %{one.written or '?'} ({one.by}, {one.line or 'no line'}): {one.fate}{size}"


def post_grad_lines(story: Story) -> list[str]:
    stage = story.post_grad
    lines = cut(by_graph(map(graph_line, stage.graphs)))
    for one in stage.passes:
        if one.removed or one.added or one.matches:
            lines.append(f"{one.graph} {one.subsystem or 'pass'}/{one.name}: {change_text(one)}")
    lines = cut(folded(lines), 2 * MOST)
    for one in stage.fusions:
        if one.matches or one.near_misses:
            near = f"{len(one.near_misses)} near miss{'es' * (len(one.near_misses) != 1)}"
            lines.append(f"graft {one.transform}: {one.matches} match{'es' * (one.matches != 1)}, {near}")
            lines += [f"  near miss {miss}" for miss in cut(list(one.near_misses), 3)]
    return lines


def change_text(run: PassRun) -> str:
    """`-aten.silu +aten.neg, aten.exp, 2 matches of mm_plus_mm`."""
    signs = (("-", run.removed), ("+", run.added))
    change = " ".join(f"{sign}{counts(dict(ops))}" for sign, ops in signs if ops)
    total = sum(run.matches.values())
    named = next(iter(run.matches)) if len(run.matches) == 1 else counts(dict(run.matches))
    matched = f"{total} match{'es' * (total > 1)} of {named}" if total else ""
    return ", ".join(filter(None, (change or "as many calls of each op", matched)))


def scheduling_lines(story: Story) -> list[str]:
    stage = story.scheduling
    graphs = list(dict.fromkeys(node.graph for node in stage.nodes))
    lines = [line for graph in graphs[:FEW] for line in scheduled_lines(story, graph)]
    if rest := graphs[FEW:]:
        count = sum(node.graph in rest for node in stage.nodes)
        lines.append(f"{plural(len(rest), 'more graph')}: {plural(count, 'node')}")
    reasons = Counter(re.sub(r"\d+", "N", one.reason) for one in stage.refusals)
    lines += [f"not fused, {plural(times, 'pair')}: {reason}" for reason, times in reasons.most_common(MOST)]
    lines += cut(folded(map(copy_line, stage.copies)))
    return lines if stage.copies or not stage.nodes else [*lines, "no copies"]


def scheduled_lines(story: Story, graph: str) -> list[str]:
    stage = story.scheduling
    nodes = [node for node in stage.nodes if node.graph == graph]
    groups = Counter(node.group for node in nodes)
    before, after = stage.bytes_before.get(graph, 0), stage.bytes_after.get(graph, 0)
    found = f"{plural(len(nodes), 'node')} in {plural(len(groups), 'group')}"
    lines = [f"graph {graph}: {found}, moving {before:,} → {after:,} bytes"]
    lines.append(f"  {counts(Counter(node.kind for node in nodes))}")
    fused = [f"  {name}: {count} nodes fused" for name, count in groups.items() if count > 1]
    return [*lines, *cut(fused, 4), *(f"  {line}" for line in cut(list(map(node_line, nodes)), FEW))]


def node_line(node: ScheduledNode) -> str:
    """`op2 Pointwise over 8 × 8: arg0, arg1 → buf2, FixedLayout float32[8, 8] strides [8, 1], in op2_op3`."""
    over = f" over {node.loops}" if node.loops else ""
    inside = f", in {node.group}" if node.group != node.name else ""
    reads, writes = ", ".join(node.reads) or "nothing", ", ".join(node.writes) or "nothing"
    return f"{node.name} {node.kind}{over}: {reads} → {writes}, {node.layout}{inside}"


def copy_line(one: CopyRecord) -> str:
    where = f" in {one.kernel}" if one.kernel else ""
    return f"copy of {bytes_text(one.bytes)} at %{one.node} {one.line}: {one.reason}{where}"


def runtime_lines(story: Story) -> list[str]:
    stage = story.runtime
    records = (
        f"{one.graph} CUDA graph {'recorded' if one.recorded else 'skipped'}{f': {one.reason}' if one.reason else ''}"
        for one in stage.cudagraphs
    )
    allocations = (
        f"{g} allocates {plural(n, 'buffer')}, {stage.reused.get(g, 0)} in reused memory"
        for g, n in stage.allocations.items()
    )
    lines = cut([*by_graph(records), *by_graph(allocations)], 2 * MOST)
    lines += [line for g, n in stage.partitions.items() for line in partition_lines(stage, g, n)]
    lines += streams_lines(stage)
    lines += [f"collectives: {', '.join(stage.collectives)}"] if stage.collectives else []
    return lines + [value_line(one) for one in stage.values]


def partition_lines(stage: RuntimeStage, graph: str, count: int) -> list[str]:
    """None for a graph that is one part, as most are."""
    cuts = [f"{one.node} ({one.reason})" for one in stage.cuts if one.graph == graph]
    if count == 1 and not cuts:
        return []
    around = f", around {', '.join(cut(cuts, FEW))}" if cuts else ""
    return [f"{graph} is recorded in {plural(count, 'part')}{around}"]


def streams_lines(stage: RuntimeStage) -> list[str]:
    current, lost = stage.streams - stage.side_streams, stage.entered_streams - stage.side_streams
    parts = [plural(current, "current stream")] if current else []
    parts += [f"{stage.side_streams} of the program's own"] if stage.side_streams else []
    lines = [f"launches on {' and '.join(parts)}"] if parts else []
    if lost > 0:
        lines.append(
            f"streams that the program enters and the code does not: {lost}, whose work is on the current one"
        )
    return lines


def value_line(one: ValueRecord) -> str:
    odd = [f"{one.not_finite} not finite"] if one.not_finite else []
    finite = [] if one.least is None else [f"{one.least:.4g} to {one.largest:.4g}", f"mean {one.mean:.4g}"]
    return f"{one.graph} {one.kernel} {one.name} {one.type}: {', '.join((*finite, *odd))}"


def cache_lines(story: Story) -> list[str]:
    stage = story.caches
    lines = by_graph(map(lookup_line, stage.lookups))
    if stage.again:
        lines += by_graph(f"again {lookup_line(one)}" for one in stage.again)
        first, second = stage.seconds
        lines.append(f"first call {first:.2f} s, again {second:.2f} s; the caches hold {bytes_text(stage.bytes)}")
    return [*cut(lines, 2 * MOST), *(fresh_lines(stage.fresh, stage.seconds[0]) if stage.fresh else [])]


def fresh_lines(fresh: FreshProcess, first: float) -> list[str]:
    if fresh.problem:
        return [f"fresh process with {bytes_text(fresh.bytes)} of artifacts: {fresh.problem}"]
    found = counts(Counter(f"{one.cache} {one.outcome}" for one in fresh.lookups)) or "nothing looked up"
    told = fresh.differs or "the same results"
    saved = f"{fresh.seconds:.2f} s, {first - fresh.seconds:.2f} s less than the first call"
    return [f"fresh process with {bytes_text(fresh.bytes)} of artifacts: {found}; {saved}; {told}"]


def lookup_line(one: CacheLookup) -> str:
    return f"{one.graph} {one.cache}: {one.outcome}{f' ({one.reason})' if one.reason else ''}"


SECTIONS: dict[str, Callable[[Story], list[str]]] = {
    "dynamo": dynamo_lines,
    "functional": functional_lines,
    "post_grad": post_grad_lines,
    "scheduling": scheduling_lines,
    "kernels": kernel_lines,
    "runtime": runtime_lines,
    "caches": cache_lines,
}
