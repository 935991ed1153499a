"""What one run of torch.compile did, stage by stage, as data that JSON holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from graft.stages.revive import revive
from graft.stages.story_code import KernelStage, RuntimeStage

STAGES = ("dynamo", "functional", "post_grad", "scheduling", "kernels", "runtime", "caches")


@dataclass(frozen=True)
class StageNode:
    """A node of a graph. sources: the nodes of the graph before that it was made from."""

    name: str
    op: str
    type: str = ""
    line: str = ""
    module: str = ""
    sources: tuple[str, ...] = ()
    original: str = ""  # the op that it was taken apart from
    callers: tuple[str, ...] = ()  # in Dynamo's graph: lines from where `line` was called, the outermost first
    args: str = ""  # `%x, 2, dim=1`; of the output, what is returned


@dataclass(frozen=True)
class StageGraph:
    """graph: Dynamo's number of the compilation, `0/1`: frame 0, compiled for the second time."""

    graph: str
    frame: str
    nodes: tuple[StageNode, ...]
    text: str = field(repr=False, default="")


@dataclass(frozen=True)
class GraphBreak:
    graph: str
    line: str
    reason: str
    explanation: str = ""
    hints: tuple[str, ...] = ()
    callers: tuple[str, ...] = ()  # lines of the program from where the line was called, the outermost first


@dataclass(frozen=True)
class GuardGroup:
    """Guards of one kind in one compilation: `TENSOR_MATCH`, how many, on what. us: what `timed` of them cost."""

    graph: str
    kind: str
    count: int
    on: tuple[str, ...] = ()
    us: float = 0.0
    timed: int = 0


@dataclass(frozen=True)
class GuardCost:
    """What one guard costs of a check of all, the way to the value that it is about (`on`) included: divided in
    proportion to the times of each alone. None: it compares several values, or its value could not be found again."""

    graph: str
    kind: str
    on: str
    us: float | None


@dataclass(frozen=True)
class Recompilation:
    """graph was compiled because the guard of `previous` failed. Values as texts, empty where they are not known."""

    graph: str
    previous: str
    guard: str
    expected: str = ""
    actual: str = ""
    line: str = ""


@dataclass(frozen=True)
class SymbolRecord:
    graph: str
    symbol: str
    source: str
    value: str
    range: str
    line: str = ""
    fixed_to: str = ""  # where it was specialised
    fixed_by: str = ""  # the line, or the reason


@dataclass(frozen=True)
class DynamoStage:
    problem: str = ""
    graphs: tuple[StageGraph, ...] = ()
    breaks: tuple[GraphBreak, ...] = ()
    guards: tuple[GuardGroup, ...] = ()
    dearest: tuple[GuardCost, ...] = ()  # of each graph the guards that cost most
    guard_us: Mapping[str, float] = field(
        default_factory=dict
    )  # one check of all guards, nothing in the cache, the median
    guard_warm_us: Mapping[str, float] = field(default_factory=dict)  # the same, as in one call after the other
    recompilations: tuple[Recompilation, ...] = ()
    symbols: tuple[SymbolRecord, ...] = ()
    notes: tuple[str, ...] = ()
    lines: Mapping[str, str] = field(default_factory=dict)  # the code at `file.py:12`


@dataclass(frozen=True)
class Decomposition:
    graph: str
    op: str
    into: tuple[str, ...]
    times: int


@dataclass(frozen=True)
class Mutation:
    """written: the input that is written. fate: what became of the write in the end."""

    graph: str
    written: str
    by: str
    line: str
    fate: str
    copied_bytes: int | str = 0


@dataclass(frozen=True)
class FunctionalStage:
    """graphs: functional and taken apart, as Inductor gets them. whole: functional, ops still whole."""

    problem: str = ""
    graphs: tuple[StageGraph, ...] = ()
    whole: tuple[StageGraph, ...] = ()
    decompositions: tuple[Decomposition, ...] = ()
    mutations: tuple[Mutation, ...] = ()


@dataclass(frozen=True)
class PassRun:
    """removed, added: calls by op. matches: by pattern, where the pass is a table of them."""

    graph: str
    subsystem: str
    name: str
    ms: float
    removed: Mapping[str, int] = field(default_factory=dict)
    added: Mapping[str, int] = field(default_factory=dict)
    matches: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class FusionRun:
    """A transform of graft's on one graph."""

    graph: str
    transform: str
    status: str
    matches: int
    near_misses: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class PostGradStage:
    problem: str = ""
    graphs: tuple[StageGraph, ...] = ()
    passes: tuple[PassRun, ...] = ()
    fusions: tuple[FusionRun, ...] = ()


@dataclass(frozen=True)
class ScheduledNode:
    """kind: of the IR (`Pointwise`, `ExternKernelOut`). group: what it was fused into; itself if alone. layout: of
    the buffer that it realises. loops: its ranges; none where it is a call. reads, writes: buffers."""

    graph: str
    name: str
    kind: str
    nodes: tuple[str, ...]
    group: str
    layout: str = ""
    loops: str = ""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refusal:
    """Two nodes or groups that the scheduler looked at and did not fuse."""

    graph: str
    first: str
    second: str
    reason: str
    times: int = 1


@dataclass(frozen=True)
class CopyRecord:
    """node: of the post-grad graph. kernel: where the copying happens, with whatever else it does."""

    graph: str
    node: str
    line: str
    bytes: int | str
    reason: str
    kernel: str = ""


@dataclass(frozen=True)
class SchedulingStage:
    """bytes: read and written by all nodes, before fusion and after it, by graph."""

    problem: str = ""
    nodes: tuple[ScheduledNode, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    copies: tuple[CopyRecord, ...] = ()
    bytes_before: Mapping[str, int] = field(default_factory=dict)
    bytes_after: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class CacheLookup:
    """cache: fx_graph or aotautograd. outcome: hit, miss or bypass. components: digests of what is in the key."""

    graph: str
    cache: str
    outcome: str
    key: str = ""
    reason: str = ""
    components: Mapping[str, str] = field(default_factory=dict)
    saved_ms: float = 0.0


@dataclass(frozen=True)
class FreshProcess:
    """The first call in another process with empty caches and the cache artifacts of this one (`bytes` of them).

    seconds: of that call. differs: in what its results were others. problem: why there are none.
    """

    lookups: tuple[CacheLookup, ...] = ()
    seconds: float = 0.0
    bytes: int = 0
    differs: str = ""
    problem: str = ""


@dataclass(frozen=True)
class CacheStage:
    """again: the same first call after all was forgotten, which comes out of the cache if it can."""

    problem: str = ""
    lookups: tuple[CacheLookup, ...] = ()
    again: tuple[CacheLookup, ...] = ()
    seconds: tuple[float, float] = (0.0, 0.0)  # the first call, and that again
    bytes: int = 0  # of what the caches hold now
    fresh: FreshProcess | None = None  # where it was asked for


@dataclass(frozen=True)
class StoryEnd:
    """Where a run ended before its end: the number of the stage, what it was doing, the error."""

    stage: int
    doing: str
    error: str

    def __str__(self) -> str:
        where = f"in stage {self.stage}" if self.stage else "outside of the compiler"
        return f"ended {where}, {self.doing}: {self.error}"


@dataclass(frozen=True)
class Story:
    target: str
    backend: str
    torch: str
    device: str
    calls: tuple[str, ...] = ()  # the arguments of each, as text
    seconds: float = 0.0
    end: StoryEnd | None = None
    notes: tuple[str, ...] = ()
    dynamo: DynamoStage = DynamoStage()
    functional: FunctionalStage = FunctionalStage()
    post_grad: PostGradStage = PostGradStage()
    scheduling: SchedulingStage = SchedulingStage()
    kernels: KernelStage = field(default_factory=KernelStage)
    runtime: RuntimeStage = field(default_factory=RuntimeStage)
    caches: CacheStage = CacheStage()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Story:
        return revive(Story, data)
