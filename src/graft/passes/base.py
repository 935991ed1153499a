"""What a transform is: what it is told, what it may know, and what it says of what it did."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Literal

import torch
from torch.fx import GraphModule

from graft.ir.patterns.match import NearMiss
from graft.ir.verify import GraphSnapshot
from graft.passes.costs import Measure
from graft.passes.report import MatchRecord
from graft.weights.lazy import LazyWeights


class Stage(StrEnum):
    """Stages run in this order."""

    MATCH = "match"
    SHARD = "shard"
    FUSE = "fuse"
    STATE = "state"
    SCHEDULE = "schedule"
    INDUCTOR = "inductor"  # not in graft's pipeline: on Inductor's own graph, while it compiles


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
    owned: the module whose weights may be freed once the graph has others; None where it is somebody else's.
    lazy: weights that still lie in their file, and have shapes alone in the module.
    kv_cache_dtype: of the caches that the decoder gets; None: that of their keys.
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
    lazy: LazyWeights | None = None
    kv_cache_dtype: torch.dtype | None = None
    shared: dict[Any, Any] | None = None


@dataclass(frozen=True)
class Outcome:
    """What a transform did. `reason` says why there are no matches."""

    matches: tuple[MatchRecord, ...] = ()
    near_misses: tuple[NearMiss, ...] = ()
    reason: str = ""
    skipped: bool = False


# of a graph, what it was before, the matches, and the largest size of an input: the matches with their checks
NumericChecker = Callable[[GraphModule, GraphSnapshot, tuple[MatchRecord, ...], int | None], tuple[MatchRecord, ...]]


class BaseTransform:
    """What the pipeline runs: it times, checks, records and rolls back.

    Subclass PatternTransform (passes/patterns.py) or Rewriter (passes/rewriter.py); `apply` itself is for a
    change of the whole graph, which has no sites: a schedule.
    """

    name: ClassVar[str]
    reads_decomposed: ClassVar[bool] = False  # whether it finds what it wants where Inductor has taken ops apart
    on_inductor: ClassVar[bool] = False  # it runs on Inductor's graphs, in that stage alone
    uncheckable: ClassVar[str] = ""  # why its matches cannot be run beside what they replaced, if so
    # kinds of inputs (ir/evaluate.py) on which the replacement gives something else on purpose, each with the reason
    not_kept: ClassVar[Mapping[str, str]] = {}
    config: TransformConfig

    def __init__(self, config: TransformConfig) -> None:
        self.config = config

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        return TransformConfig

    def own_check(self, context: Context) -> NumericChecker | None:
        """The numeric check of its matches, where the one of passes/numeric_check.py does not do."""
        return None

    def apply(self, gm: GraphModule, context: Context) -> Outcome:
        """Rewrites `gm` in place."""
        raise NotImplementedError
