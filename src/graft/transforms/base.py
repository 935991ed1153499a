"""What a transform is, and the two kinds there are: a pattern with its replacement, or a walk over the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Literal

import torch
from torch.fx import GraphModule, Node, map_arg

from graft.errors import VerificationError
from graft.graph.edit import Editor, check_same_kind
from graft.graph.match import Finder, Match, NearMiss, spec_of
from graft.graph.nodes import module_path, where
from graft.graph.pattern import exact_pattern, tensor_names
from graft.graph.text import target_text
from graft.graph.trace import current_dialect
from graft.ops.fused_linear.file_rows import Held
from graft.transforms.costs import Measure
from graft.transforms.report import MatchRecord


class Stage(StrEnum):
    """Stages run in this order."""

    MATCH = "match"
    FUSE = "fuse"
    STATE = "state"
    SCHEDULE = "schedule"


@dataclass(frozen=True)
class TransformConfig:
    """What every transform can be told in YAML. Subclasses add options, each with a type and a default."""

    stage: Stage
    enabled: bool = True
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    on_error: Literal["raise", "skip"] = "raise"


@dataclass
class Context:
    """What transforms may know beyond the graph, and where they leave what the engine needs.

    backend: what the graph is lowered to afterwards: the native one fuses on a CPU what others fuse on a GPU.
    owned: the module whose weights may be given up once the graph has others; None where it is somebody else's.
    held: weights that still lie in their file, and have shapes alone in the module.
    shared: what several graphs of one module have in common, so that a second capture does not make it again.
    """

    route: Literal["decoder", "module"] = "module"
    block_size: int = 16
    backend: str = "auto"
    context_length: int | None = None  # positions are below it
    measure: Measure | None = None  # runs graphs on real inputs, where there are any
    outputs: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # for the report
    owned: torch.nn.Module | None = None
    held: Held | None = None
    shared: dict[Any, Any] | None = None


@dataclass(frozen=True)
class Outcome:
    """What a transform did. `reason` says why there are no matches."""

    matches: tuple[MatchRecord, ...] = ()
    near_misses: tuple[NearMiss, ...] = ()
    reason: str = ""
    skipped: bool = False


class BaseTransform:
    """Subclass, implement `apply`, and register. The pipeline times, checks, records and rolls back."""

    name: ClassVar[str]
    reads_decomposed: ClassVar[bool] = False  # whether it finds its place where Inductor has taken ops apart
    unprovable: ClassVar[str] = ""  # why its matches cannot be run beside what they replaced, if so
    config: TransformConfig

    def __init__(self, config: TransformConfig) -> None:
        self.config = config

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        return TransformConfig

    def apply(self, gm: GraphModule, context: Context) -> Outcome:
        """Rewrites `gm` in place."""
        raise NotImplementedError


@dataclass(frozen=True)
class Rewrite:
    """A pattern and what replaces it, both plain functions of the same arguments.

    shapes: "b s d" for each tensor, letters shared between them. check: None to accept a match, or why not.
    allow_readers: inner values may be read from outside; they are then computed twice. needs: calls of the canonical
    pattern without which nothing can fit; a graph that lacks one is not searched, and the pattern not even traced.
    exact: the replacement's reference computes the same bits; False where it may be a few roundings off. refuse: why
    this pattern is known and yet left alone; every place that fits becomes a near miss.
    """

    pattern: Callable[..., Any]
    replacement: Callable[..., Any]
    shapes: dict[str, str]
    check: Callable[[Match], str | None] | None = None
    allow_readers: bool = False
    needs: tuple[Any, ...] = ()
    exact: bool = True
    refuse: str = ""

    def finder(self) -> Finder:
        return Finder(self.pattern, self.shapes, self.allow_readers, self.needs)


class PatternTransform(BaseTransform):
    """A transform that is a list of rewrites, tried in order."""

    reads_decomposed = True  # patterns are taken apart in the same way

    def rewrites(self) -> Sequence[Rewrite]:
        raise NotImplementedError

    def apply(self, gm: GraphModule, context: Context) -> Outcome:  # noqa: ARG002
        editor = Editor(gm, self.name)
        records: list[MatchRecord] = []
        misses: list[NearMiss] = []
        lacking: list[str] = []
        tried: list[str] = []
        for rewrite in self.rewrites():
            present = {node.target for node in gm.graph.nodes}
            absent = next((op for op in rewrite.needs if op not in present and current_dialect().keeps(op)), None)
            if absent is not None:
                lacking.append(target_text(absent))
                continue
            tried.append(rewrite.pattern.__name__)
            matches, near = rewrite.finder().find(gm.graph)
            misses += near
            renamed: dict[Node, Node] = {}
            for match in matches:
                problem = rewrite.refuse or (rewrite.check(match) if rewrite.check else None)
                problem = problem or kind_problem(rewrite, match)
                if problem:
                    size = len(match.nodes)
                    misses.append(
                        NearMiss(match.pattern, where(match.anchor), f"%{match.anchor.name}", problem, size, size)
                    )
                else:
                    records.append(apply_rewrite(editor, rewrite, match, renamed))
        taken = {f"%{name}" for record in records for name in record.replaced}
        left = tuple(miss for miss in misses if miss.anchor.split()[0] not in taken)
        return Outcome(tuple(records), left, "" if records else no_match_reason(left, lacking, tried))


def no_match_reason(misses: Sequence[NearMiss], lacking: Sequence[str] = (), tried: Sequence[str] = ()) -> str:
    """The nearest miss, or what the graph lacks for the patterns that were not even tried."""
    if not misses:
        without = f"the graph has no {' and no '.join(dict.fromkeys(lacking))}" if lacking else ""
        alike = f"nothing in the graph looks like {', '.join(dict.fromkeys(tried)) or 'the pattern'}"
        return "; ".join(part for part in (alike if tried or not lacking else "", without) if part)
    closest = max(misses, key=lambda miss: (miss.matched / max(miss.size, 1), miss.size))
    return f"{len(misses)} near misses; closest at {closest.anchor}: {closest.reason}"


def kind_problem(rewrite: Rewrite, match: Match) -> str | None:
    """Why the replacement cannot stand in for the match: it gives another shape or dtype, or refuses the inputs."""
    specs = {name: spec_of(node) for name, node in match.tensors.items()}
    try:
        wanted = exact_pattern(rewrite.pattern, specs, match.literals)
        offered = exact_pattern(rewrite.replacement, specs, match.literals, written=True)
        insertion_point(match)
        for old, new in zip(wanted.outputs, offered.outputs, strict=True):
            check_same_kind(old, new, rewrite.replacement.__name__)
    except (VerificationError, RuntimeError, TypeError) as error:
        return f"the replacement does not fit: {str(error).splitlines()[0]}"
    return None


def apply_rewrite(editor: Editor, rewrite: Rewrite, match: Match, renamed: dict[Node, Node]) -> MatchRecord:
    """Inserts the replacement above the anchor, points the readers at it, and erases what is dead."""
    specs = {name: spec_of(node) for name, node in match.tensors.items()}
    body = exact_pattern(rewrite.replacement, specs, match.literals, written=True)
    names = tensor_names(rewrite.replacement)
    bound = {p: renamed.get(n := match.tensors[name], n) for p, name in zip(body.inputs, names, strict=True)}
    made = []
    before = insertion_point(match)
    for node in body.graph.nodes:
        if node.op == "call_function":
            args, kwargs = map_arg(node.args, bound.__getitem__), map_arg(node.kwargs, bound.__getitem__)
            bound[node] = editor.call(node.target, args, kwargs, before=before, like=match.anchor)
            made.append(bound[node].name)
    record = MatchRecord(
        where(match.anchor),
        module_path(match.anchor),
        tuple(n.name for n in match.nodes),
        tuple(made),
        match.pattern,
    )
    for old, new in zip(match.outputs, body.outputs, strict=True):
        editor.replace(old, bound[new])
        renamed[old] = bound[new]
    erase_dead(editor, match.nodes)
    return record


def insertion_point(match: Match) -> Node:
    """The earliest result: its readers come below it, and the inputs must come above it."""
    point = min(match.outputs)
    late = next((node for node in match.tensors.values() if point < node), None)
    if late is not None:
        raise VerificationError(f"{where(late)} is computed after {where(point)}, which would need it")
    return point


def erase_dead(editor: Editor, nodes: Sequence[Node]) -> None:
    for node in sorted(nodes, reverse=True):
        if not node.users:
            editor.graph.erase_node(node)
