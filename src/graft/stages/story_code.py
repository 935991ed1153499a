"""What a story holds of stages 5 and 6: the code that was generated, what autotuning chose, and how it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class KernelRecord:
    """language: cpp, triton, extern (`extern_kernels.mm`) or op (`torch.ops.graft.swiglu.default`)."""

    graph: str
    name: str
    language: str
    launches: int = 1
    nodes: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    source: str = field(repr=False, default="")
    us: float = 0.0  # one launch alone, on average, its data in the cache, the median; 0 where it was not measured
    us_range: tuple[float, ...] = ()  # of the readings without the lowest and the highest tenth
    not_timed: str = ""  # why
    arguments: tuple[str, ...] = ()  # of its first launch: `float32[4, 16] (16, 1) cpu`
    registers: int | None = None  # of a thread, Triton's kernels on a GPU
    spills: int | None = None
    shared: int | None = None
    tile: str = ""
    shapes: int = 1  # of arguments that its launches have
    by_launch: tuple[tuple[str, ...], ...] = ()  # the nodes of each launch, where there are several


@dataclass(frozen=True)
class AutotuneRecord:
    """A call (`mm`) with its choices, or a Triton kernel with its configurations. ms: each with its time, the fastest
    first. tiles: block sizes and warps of a choice; a configuration is named by them. registers, spills: of a
    configuration. failed: how many did not run on this device."""

    graph: str
    name: str
    ms: Mapping[str, float]
    tiles: Mapping[str, str] = field(default_factory=dict)
    registers: Mapping[str, int] = field(default_factory=dict)
    spills: Mapping[str, int] = field(default_factory=dict)
    failed: int = 0


@dataclass(frozen=True)
class SingleChoice:
    """A call for which autotuning had one choice. reason: which, and why there is no other."""

    graph: str
    name: str
    reason: str


@dataclass(frozen=True)
class KernelStage:
    problem: str = ""
    kernels: tuple[KernelRecord, ...] = ()
    choices: tuple[AutotuneRecord, ...] = ()
    configs: tuple[AutotuneRecord, ...] = ()  # of generated Triton kernels
    single: tuple[SingleChoice, ...] = ()
    autotuning: str = ""  # why nothing was timed
    resources: str = ""  # why there are no registers and spills
    code: Mapping[str, str] = field(default_factory=dict)  # what was generated for each graph


@dataclass(frozen=True)
class CudagraphRecord:
    """asked: whether CUDA graphs were switched on. recorded: in this run. reason: why none was."""

    graph: str
    asked: bool
    recorded: bool
    reason: str = ""


@dataclass(frozen=True)
class PartitionCut:
    """A node of the IR that CUDA graphs leave out, so that its graph is recorded in parts around it."""

    graph: str
    node: str
    reason: str


@dataclass(frozen=True)
class ValueRecord:
    """What a launch wrote: least, largest and mean of what is finite, and how many numbers are not."""

    graph: str
    kernel: str
    name: str
    type: str
    least: float | None = None
    largest: float | None = None
    mean: float | None = None
    not_finite: int = 0


@dataclass(frozen=True)
class RuntimeStage:
    """allocations: of buffers in the generated code; reused: those that take over the memory of one that is done.
    partitions: parts of a graph that CUDA graphs are recorded of apart from what cannot be recorded (cuts). streams:
    that generated code launches on; side_streams: the program's own among them, beside the current ones;
    entered_streams: those in whose contexts the program makes calls, which not every Inductor keeps."""

    problem: str = ""
    cudagraphs: tuple[CudagraphRecord, ...] = ()
    allocations: Mapping[str, int] = field(default_factory=dict)
    reused: Mapping[str, int] = field(default_factory=dict)
    partitions: Mapping[str, int] = field(default_factory=dict)
    cuts: tuple[PartitionCut, ...] = ()
    streams: int = 0
    side_streams: int = 0
    entered_streams: int = 0
    collectives: tuple[str, ...] = ()
    values: tuple[ValueRecord, ...] = ()  # in the order of the launches, where they were asked for
