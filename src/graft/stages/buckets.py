"""A function compiled in pieces for sizes that are known ahead, as serving engines do it: split at attention, each
piece compiled once for each size, and what every later call reuses.

Dynamo traces the function once with its sizes open. What lies between the ops to split at is a piece; those ops stay
as they are. The first call of a size compiles every piece for that size, on a GPU with CUDA graphs.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch._inductor
import torch._inductor.config
from torch.fx import GraphModule, Node
from torch.fx.passes.split_module import split_module

from graft.backends.inductor import reset_compiler, trust_instruction_sets
from graft.stages.bucket_story import BucketCall, BucketStory, PieceCompiled
from graft.stages.caches import KINDS, own_caches
from graft.stages.cudagraphs import SeenCudagraphs, final
from graft.stages.ends import first_line
from graft.stages.kernels import read_source
from graft.stages.needs import Reached
from graft.stages.recompiles import SeenFailures, read_recompilations, watch_failures
from graft.stages.runtime import watch_runtime
from graft.stages.story import StoryEnd
from graft.stages.story_code import CudagraphRecord
from graft.stages.tell import Keeper, device_of
from graft.stages.trace import TraceCollector, tracing_rows

NEEDS = ("torch._inductor:standalone_compile",)


@dataclass
class BucketRun:
    """What goes on while the calls are made. size: of the call under way."""

    split_at: tuple[str, ...]
    options: Mapping[str, Any]
    trace: TraceCollector
    runtime: SeenCudagraphs
    size: int = 0
    traces: int = 0
    reused: int = 0
    pieces: tuple[int, ...] = ()
    left: tuple[str, ...] = ()
    compiled: list[PieceCompiled] = field(default_factory=list)

    def backend(self, gm: GraphModule, _example: Sequence[Any]) -> Callable[..., Any]:
        self.traces += 1
        split, pieces = split_graph(gm, self.split_at)
        self.pieces = tuple(len(calls_in(split.get_submodule(name))) for name in pieces)
        self.left = tuple(dict.fromkeys(op_name(node) for node in gm.graph.nodes if is_split(node, self.split_at)))
        for number, name in enumerate(pieces):
            setattr(split, name, SizedPiece(self, number, split.get_submodule(name)))
        return split.forward


class SizedPiece(torch.nn.Module):
    """A piece that is compiled for each size when a call of that size first comes to it."""

    def __init__(self, run: BucketRun, number: int, graph: GraphModule) -> None:
        super().__init__()
        self.run, self.number, self.graph = run, number, graph
        self.made: dict[int, Callable[..., Any]] = {}

    def forward(self, *args: Any) -> Any:
        run = self.run
        run.runtime.around = piece_name(run.size, self.number)
        try:
            if run.size in self.made:
                run.reused += 1
            else:
                self.made[run.size] = self.compiled(args)
            return self.made[run.size](*[a for a in args if isinstance(a, torch.Tensor)])
        finally:
            run.runtime.around = ""

    def compiled(self, args: Sequence[Any]) -> Callable[..., Any]:
        run = self.run
        rows, records, started = len(run.trace.rows), len(run.runtime.records), time.perf_counter()
        tensors: list[Any] = [a for a in args if isinstance(a, torch.Tensor)]
        with torch._inductor.config.patch(dict(run.options)):
            made = torch._inductor.standalone_compile(
                sized(self.graph, args), tensors, dynamic_shapes="from_example_inputs"
            )
        seconds = time.perf_counter() - started
        seen = TraceCollector()
        seen.rows = run.trace.rows[rows:]
        outcomes = {KINDS[row.kind] for row in seen.of(*KINDS)}
        how = "out of the cache" if any(outcome == "hit" for _, outcome in outcomes) else "compiled"
        code = seen.of("inductor_output_code")
        kernels = sum(1 for _ in read_source(code[-1].payload)) if code else 0
        graphs = run.runtime.records[records:]
        captured = bool(graphs) and all(one.recorded for one in graphs)
        reason = next((one.reason for one in graphs if one.reason), "")
        run.compiled.append(PieceCompiled(run.size, self.number, how, seconds, kernels, captured, reason))
        return made


def piece_name(size: int, number: int) -> str:
    return f"piece {number} for {size}"


def settled(seen: SeenCudagraphs, one: PieceCompiled) -> PieceCompiled:
    """After all calls: whether it was recorded, which the second call of its size does."""
    if not one.captured:
        return one
    record = final(CudagraphRecord(piece_name(one.size, one.piece), asked=True, recorded=True), seen)
    return replace(one, captured=record.recorded, reason=record.reason)


def split_graph(gm: GraphModule, split_at: Sequence[str]) -> tuple[GraphModule, list[str]]:
    """The graph as a chain of submodules, and the names of those that are pieces."""
    number, before, parts, left = 0, False, {}, set()
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        at = is_split(node, split_at)
        number += int((at or before) and bool(parts))
        left |= {number} if at else set()
        parts[node], before = number, at
    split = split_module(gm, gm, lambda node: parts[node], keep_original_order=True)
    names = [name for name, _ in split.named_children() if name.startswith("submod_")]
    return split, [name for name in names if int(name.removeprefix("submod_")) not in left]


def is_split(node: Node, split_at: Sequence[str]) -> bool:
    return node.op == "call_function" and any(word in op_name(node) for word in split_at)


def op_name(node: Node) -> str:
    target = node.target
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def calls_in(gm: Any) -> list[Node]:
    return [node for node in gm.graph.nodes if node.op not in ("placeholder", "output", "get_attr")]


def sized(gm: GraphModule, args: Sequence[Any]) -> GraphModule:
    """The piece with the sizes of this call in place of the inputs that stand for them."""
    made = copy.deepcopy(gm)
    for node, value in zip([n for n in made.graph.nodes if n.op == "placeholder"], args, strict=True):
        if not isinstance(value, torch.Tensor):
            node.replace_all_uses_with(value)
            made.graph.erase_node(node)
    made.recompile()
    return made


def tell_buckets(
    function: Callable[..., Any],
    calls: Mapping[int, tuple[Any, ...]],
    *,
    target: str = "",
    split_at: Sequence[str] = ("attention",),
    dynamic: bool | None = True,
    options: Mapping[str, Any] | None = None,
    keeper: Keeper | None = None,
) -> BucketStory:
    """calls: the arguments for each size. Every size is called twice; the second time nothing is left to compile.
    keeper: is given the story so far before each call."""
    trust_instruction_sets()
    device = device_of(function, list(calls.values()))
    given = {"triton.cudagraphs": True, **(options or {})}
    story = BucketStory(target or getattr(function, "__name__", ""), torch.__version__, device, tuple(split_at))
    made: list[BucketCall] = []
    end: StoryEnd | None = None
    seen, failures = SeenCudagraphs(), SeenFailures()
    reset_compiler()
    try:
        with (
            own_caches(keeper.folder if keeper is not None else None),
            tracing_rows() as trace,
            watch_runtime(seen, Reached()),
            watch_failures(failures),
            torch.no_grad(),
        ):
            run = BucketRun(story.split_at, given, trace, seen)
            compiled = torch.compile(function, backend=run.backend, dynamic=dynamic)
            try:
                for size, args in [*calls.items(), *calls.items()]:
                    if keeper is not None:
                        keeper.at(0, f"calling size {size}")
                        keeper.story(replace(story, pieces=run.pieces, left=run.left, calls=tuple(made)))
                    made.append(one_call(run, compiled, size, args))
            except (Exception, SystemExit) as error:  # noqa: BLE001  whatever a program raises ends its story, and is told there
                end = StoryEnd(0, f"calling size {run.size}", first_line(error))
            found = read_recompilations(trace, failures)
            made = [replace(one, compiled=tuple(settled(seen, piece) for piece in one.compiled)) for one in made]
    finally:
        reset_compiler()
    return replace(
        story, pieces=run.pieces, left=run.left, calls=tuple(made), recompilations=found, end=end,
    )  # fmt: skip


def one_call(run: BucketRun, compiled: Callable[..., Any], size: int, args: tuple[Any, ...]) -> BucketCall:
    run.size, traces, reused, before = size, run.traces, run.reused, len(run.compiled)
    started = time.perf_counter()
    compiled(*copy.deepcopy(args))
    seconds = time.perf_counter() - started
    return BucketCall(size, seconds, run.traces > traces, tuple(run.compiled[before:]), run.reused - reused)
