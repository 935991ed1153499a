"""Stage 1, guards: how many of which kind, and what each costs when it is checked."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch._dynamo.guards

from graft.base.timers import clocked
from graft.stages.needs import swapped
from graft.stages.story import GuardCost, GuardGroup
from graft.stages.trace import TraceCollector, current_graph

NEEDS = (
    "torch._dynamo.guards:guard_manager_testing_hook_fn",
    "torch._dynamo.guards:profile_guard_manager",
    "torch._C._dynamo.guards:RootGuardManager.get_leaf_guards",
    "torch._C._dynamo.guards:RootGuardManager.get_child_managers",
    "torch._C._dynamo.guards:RootGuardManager.get_source",
)
RELATIONS = (
    "OBJECT_ALIASING",
    "NO_TENSOR_ALIASING",
    "STORAGE_OVERLAPPING",
)  # one call alone changes what the next sees
IN_A_ROW, REPEATS, ROUNDS = 10, 2, 6
COLD_ROUNDS = 5  # torch's own one reading was 200 times this on busy cores
DEAREST = 8  # guards of a graph that are told one by one
MOST_NAMES = 8  # of what the guards of one kind are about


@dataclass
class SeenGuards:
    """costs: of each guard. By graph: warm, one check of all of them; cold, one after the caches were flushed."""

    costs: list[GuardCost] = field(default_factory=list)
    cold: dict[str, float] = field(default_factory=dict)
    warm: dict[str, float] = field(default_factory=dict)


@contextmanager
def watch_guards(seen: SeenGuards) -> Iterator[None]:
    """torch calls its hook once the guards of a graph are made, while the values that they are about are there."""

    def make(before: Callable[..., Any] | None) -> Callable[..., Any]:
        def hook(manager: Any, scope: Mapping[str, Any], builder: Any) -> None:
            if before is not None:
                before(manager, scope, builder)
            graph = current_graph()
            seen.costs = [one for one in seen.costs if one.graph != graph]  # a frame that was traced again
            seen.warm[graph] = min(call_us(manager.root.check, scope) for _ in range(ROUNDS))
            profile: Any = torch._dynamo.guards.profile_guard_manager  # by its name there: tests replace it
            cold = [profile(manager.root, scope, 1) for _ in range(COLD_ROUNDS)]
            seen.cold[graph] = statistics.median(cold)
            seen.costs += guard_costs(graph, manager.root, {**builder.scope, "L": scope}, seen.warm[graph])

        return hook

    with swapped(torch._dynamo.guards, "guard_manager_testing_hook_fn", make):
        yield


def call_us(check: Callable[[Any], Any], value: Any) -> float:
    return 1e6 * min(clocked(lambda: check(value), REPEATS, in_a_row=IN_A_ROW))


def guard_costs(graph: str, root: Any, scope: Mapping[str, Any], whole: float) -> list[GuardCost]:
    """The time of a check of all, divided among the guards in proportion to the times of each alone.

    Each is called from Python, which takes longer than most guards do, so that times alone cannot be added up; the
    least of all calls is taken off each.
    """
    found = list(leaf_guards(root))
    checks = [check_of(source, guard, scope) for source, guard in found]
    rounds = [[call_us(*check) for check in checks if check] for _ in range(ROUNDS)]  # a busy moment spoils one
    times = [min(several) for several in zip(*rounds, strict=True)]
    empty = min(times, default=0.0)
    share = whole / (sum(time - empty for time in times) or 1.0)
    rest = iter(times)
    return [
        GuardCost(
            graph, type(guard).__name__, source or "L", round(share * (next(rest) - empty), 4) if check else None
        )
        for (source, guard), check in zip(found, checks, strict=True)
    ]


def check_of(source: str, guard: Any, scope: Mapping[str, Any]) -> tuple[Callable[[Any], Any], Any] | None:
    """How it is called and with what; None where that is not known, or must not be done apart from the others."""
    if type(guard).__name__ in RELATIONS:
        return None
    try:
        value = scope["L"] if source in ("", "L") else eval(source, dict(scope))
        return (guard.__call__, value) if guard(value) else None
    except Exception:  # noqa: BLE001  a source that is no expression, as of an iterator
        return None


def leaf_guards(manager: Any) -> Iterator[tuple[str, Any]]:
    source = manager.get_source()
    for guard in manager.get_leaf_guards():
        yield source, guard
    inner = [*manager.get_child_managers()]
    if hasattr(manager, "get_key_value_managers"):
        inner += [one for pair in manager.get_key_value_managers().values() for one in pair if one is not None]
    for one in inner:
        yield from leaf_guards(one)
    if hasattr(manager, "get_epilogue_lambda_guards"):
        for guard in manager.get_epilogue_lambda_guards():
            yield "L", guard


def guard_groups(seen: SeenGuards, trace: TraceCollector) -> tuple[GuardGroup, ...]:
    """By kind, most of them first; out of the trace's text where torch has no hook, which has no times."""
    if not seen.costs:
        return tuple(g for row in trace.of("dynamo_cpp_guards_str") for g in read_guards(row.graph, row.payload))
    found: dict[tuple[str, str], list[GuardCost]] = {}
    for one in seen.costs:
        found.setdefault((one.graph, one.kind), []).append(one)
    groups = [group_of(graph, kind, ones) for (graph, kind), ones in found.items()]
    order = list(dict.fromkeys(one.graph for one in seen.costs))
    return tuple(sorted(groups, key=lambda one: (order.index(one.graph), -one.count, one.kind)))


def group_of(graph: str, kind: str, guards: Sequence[GuardCost]) -> GuardGroup:
    times = [one.us for one in guards if one.us is not None]
    on = tuple(dict.fromkeys(one.on for one in guards))[:MOST_NAMES]
    return GuardGroup(graph, kind, len(guards), on, round(sum(times), 3), len(times))


def dearest(seen: SeenGuards) -> tuple[GuardCost, ...]:
    """The few of each graph that cost most."""
    graphs = dict.fromkeys(one.graph for one in seen.costs)
    by_cost = sorted((one for one in seen.costs if one.us), key=lambda one: -(one.us or 0.0))
    return tuple(one for graph in graphs for one in [c for c in by_cost if c.graph == graph][:DEAREST])


def read_guards(graph: str, text: str) -> list[GuardGroup]:
    """Of the guard tree: `| | +- TENSOR_MATCH: check_tensor(L['x'], …)`."""
    found: dict[str, list[str]] = {}
    for kind, rest in re.findall(r"\+- ([A-Z][A-Z_]+): (.*)", text):
        source = re.search(r"[LG]\[[^\]]*\][^\s,()]*", rest)
        found.setdefault(kind, []).append(source[0] if source else rest.split("#")[0].strip()[:60])
    ordered = sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))
    return [GuardGroup(graph, kind, len(on), tuple(dict.fromkeys(on))[:MOST_NAMES]) for kind, on in ordered]
