"""From a graph to its candidates."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import GraphModule

from graft.base.files import Progress
from graft.ir.edit import second_module
from graft.ir.effects import mutated_roots
from graft.ir.io.text import node_text
from graft.ir.nodes import calls
from graft.ir.patterns.match import Refused
from graft.passes.base import Context
from graft.passes.config import PipelineConfig, load_config
from graft.passes.library.rope.positions import computed_from_positions
from graft.passes.pipeline import run_pipeline
from graft.workbench.discover.aten import aten_kernels
from graft.workbench.discover.calls import is_attention, is_free, is_matmul
from graft.workbench.discover.candidates import Candidate, Discovery
from graft.workbench.discover.gemms import MERGES, horizontal, layer_names, with_gemms
from graft.workbench.discover.grouping import grouped, sites
from graft.workbench.discover.inductor import inductor_patterns
from graft.workbench.discover.installed import installed_kernels
from graft.workbench.discover.judge import CandidateEvidence, judge
from graft.workbench.discover.known import Known, look_by_value
from graft.workbench.discover.lookup import Existing, graft_op, has_devices, look_in_graft, transform_file
from graft.workbench.discover.rating import RISKS, complexity, numeric_risk
from graft.workbench.discover.regions import CandidateRegion, find_pieces
from graft.workbench.discover.savings import Estimate, Machine, StepEstimate, cost, fused_bytes, size_notes, step_of
from graft.workbench.discover.source import op_name
from graft.workbench.discover.subgraph import extract

TOKENS = (1, 512)


@dataclass(frozen=True)
class Setting:
    """on_gpu: calls that an enabled transform takes on a GPU, and which one. off: transforms that are off."""

    on_gpu: dict[str, str]
    off: set[str]


def discover(
    gm: GraphModule,
    *,
    model: str = "",
    config: PipelineConfig | None = None,
    tokens: Sequence[int] = TOKENS,
    machine: Machine | None = None,
    progress: Progress | None = None,
    other_devices: bool = True,
    together: Sequence[tuple[str, ...]] | None = None,
) -> Discovery:
    """The fusion candidates of a captured or transformed graph, which stays as it is.

    `config` is the one that the graph was transformed with: what its transforms would do on a GPU is not a candidate,
    unless `other_devices` is off, for a graph that was transformed for the device where it runs. `together`:
    weights of layers that could be one (gemms.py: mergeable). Where it is given these are candidates, and so is each
    other one together with the GEMM beside it.
    """
    started = time.perf_counter()
    machine, tokens = machine or Machine(), tuple(tokens)
    groups = grouped(find_pieces(gm))
    config = config or load_config()
    elsewhere = taken_on_gpu(gm, config) if groups and other_devices else {}
    off = {name for name, settings in config.transforms.items() if not settings.enabled}
    steps = tuple(step_of(gm.graph, count, machine) for count in tokens)
    found = []
    for index, (key, pieces) in enumerate(groups.items()):
        if progress:
            progress("looking for kernels", index, len(groups))
        found.append(candidate_of(key, pieces, gm, Setting(elsewhere, off), steps, machine))
    if together is not None:
        found += around_gemms(gm, together, found, Setting(elsewhere, off), steps, machine)
    found.sort(key=order_of)
    if together is not None:  # what takes a GEMM comes when all else is known: merges, and what it is compared with
        found.sort(key=lambda one: (one.recommendation == "defer", one.kind != "horizontal_gemm" and takes_gemm(one)))
    seconds = time.perf_counter() - started
    notes = size_notes(gm.graph, steps)
    taken = tuple(step.microseconds for step in steps)
    return Discovery(model, tuple(found), tokens, notes, machine, taken, seconds)


def around_gemms(
    gm: GraphModule,
    together: Sequence[tuple[str, ...]],
    narrow: Sequence[Candidate],
    setting: Setting,
    steps: Sequence[StepEstimate],
    machine: Machine,
) -> list[Candidate]:
    """What reads a GEMM first: an epilogue needs no row twice. A GEMM is in one of them at most."""
    order = {node: index for index, node in enumerate(gm.graph.nodes)}
    taken = {node for candidate in narrow for piece in candidate.pieces for node in piece.nodes if is_matmul(node)}
    found = [
        candidate_of(key, pieces, gm, setting, steps, machine) for key, pieces in horizontal(gm, together).items()
    ]
    for candidate in sorted(narrow, key=lambda one: one.kind != "gemm_epilogue"):
        wider = grouped(with_gemms(candidate.pieces, order, taken))
        for key, pieces in wider.items():
            made = candidate_of(key, pieces, gm, setting, steps, machine)
            found.append(replace(made, over=candidate.id))
    return found


ALIKE = 1.1  # savings within a tenth of one another are alike: estimates are no better


def takes_gemm(candidate: Candidate) -> bool:
    return any(is_matmul(node) for node in candidate.pieces[0].nodes)


def order_of(candidate: Candidate) -> tuple[Any, ...]:
    """By saving at the first count of tokens; among those that save alike first what is less of a risk, then what is
    less to write."""
    first = candidate.saving_us
    step = math.floor(math.log(first, ALIKE)) if first > 0 else -math.inf
    return (
        candidate.recommendation == "defer", -step, RISKS.index(candidate.numeric_risk), candidate.complexity,
        *(-estimate.saving_us for estimate in candidate.estimates),
    )  # fmt: skip


def candidate_of(
    key: str,
    pieces: list[CandidateRegion],
    gm: GraphModule,
    setting: Setting,
    steps: Sequence[StepEstimate],
    machine: Machine,
) -> Candidate:
    piece = pieces[0]
    evidence = gather(piece, pieces, gm, setting)
    estimates = tuple(estimate(pieces, evidence, step, machine) for step in steps)
    candidate = Candidate(
        id=key,
        kind=piece.kind,
        title=title_of(piece),
        count=len(pieces),
        sites=sites(pieces),
        nodes=tuple(node_text(node, origin=False) for node in piece.nodes),
        estimates=estimates,
        lookup="found" if evidence.existing else "not_found",
        existing=evidence.existing,
        recommendation="defer",
        reason="",
        complexity=complexity(piece),
        numeric_risk=numeric_risk(piece),
        pieces=tuple(pieces),
    )
    return replace(candidate, **judge(candidate, evidence))


def title_of(piece: CandidateRegion) -> str:
    """`sigmoid → mul → add`."""
    if piece.kind == "horizontal_gemm":
        return " + ".join(layer_names(piece))
    names = [op_name(node) for node in piece.nodes if not is_free(node)]
    return " → ".join(names if len(names) <= 9 else [*names[:7], "…", names[-1]])


def gather(
    piece: CandidateRegion, pieces: list[CandidateRegion], gm: GraphModule, setting: Setting
) -> CandidateEvidence:
    """All that is known about a piece: what exists for it whole, what for a part of it, who takes it on a GPU."""
    subgraph = extract(piece)
    on_gpu = takers(pieces, setting.on_gpu)
    if piece.kind == "horizontal_gemm":
        merged = Existing("graft", "aten::linear", transform_file(MERGES), (MERGES,))
        return CandidateEvidence((merged,), subgraph, on_gpu=on_gpu)
    if piece.kind == "position_table":
        table = tabulated(piece, gm)
        on_gpu = ("tabulate_rope",) if table and "tabulate_rope" not in setting.off else ()
        return CandidateEvidence(table, subgraph, on_gpu=on_gpu)
    if piece.walk is not None:
        found = [graft_op(op, (piece.walk.transform,)) for op in piece.walk.ops]
        if piece.kind != "experts":
            found += look_by_value(subgraph, every_kernel())[0]
        return CandidateEvidence(tuple(found), subgraph, launches=piece.walk.launches, on_gpu=on_gpu)
    own = look_in_graft(subgraph)
    others, unseen = look_by_value(subgraph, every_kernel())
    launches = sum(not is_free(node) for node in calls(own.rewritten.graph))
    # a part that a switch brings back comes first; what is then left of the piece is another candidate
    off = any(name in setting.off for name in own.transforms)
    switch = not own.whole and not others and off and launches < piece.launches()
    known = own.whole or switch
    return CandidateEvidence(
        (*(own.found if known else ()), *others),
        subgraph,
        own.rewritten if known else None,
        launches if known else 1,
        () if own.whole else own.found,
        own.covered,
        own.misses,
        on_gpu,
        unseen,
    )


def every_kernel() -> tuple[Known, ...]:
    """All that can be compared by value: ATen's, Inductor's patterns, and what other packages registered."""
    return (*aten_kernels(), *inductor_patterns(), *installed_kernels())


def takers(pieces: list[CandidateRegion], elsewhere: dict[str, str]) -> tuple[str, ...]:
    """Who takes every call of every site that is no GEMM; () where one is left."""
    names = [n.name for one in pieces for n in one.nodes if not (is_free(n) or is_matmul(n) or is_attention(n))]
    return tuple(sorted({elsewhere[n] for n in names})) if all(n in elsewhere for n in names) else ()


def tabulated(piece: CandidateRegion, gm: GraphModule) -> tuple[Existing, ...]:
    """tabulate_rope, where every result is computed from the positions alone, each by itself."""
    mutated = mutated_roots(gm.graph)
    try:
        for node in piece.outputs():
            computed_from_positions(node, mutated)
    except Refused:
        return ()
    return (Existing("graft", "aten::embedding", transform_file("tabulate_rope"), ("tabulate_rope",)),)


def taken_on_gpu(gm: GraphModule, config: PipelineConfig) -> dict[str, str]:
    """Calls of the graph that an enabled transform takes on a GPU, by name, and which one does."""
    chosen = {
        name: replace(settings, on_error="skip", devices=("cuda", "cpu", "meta"))  # pyrefly: ignore
        if has_devices(settings)
        else replace(settings, enabled=False)
        for name, settings in config.transforms.items()
    }
    twin = second_module(gm)
    report = run_pipeline(twin, replace(config, transforms=chosen, verify="structure"), Context(route="decoder"))
    return {
        name: record.name
        for record in report.transforms.values()
        for match in record.matches
        for name in match.replaced
    }


def estimate(
    pieces: Sequence[CandidateRegion], evidence: CandidateEvidence, step: StepEstimate, machine: Machine
) -> Estimate:
    """All sites together. Where existing kernels need more than one launch, theirs are counted."""
    sizes = step.sizes
    now = [cost(piece.nodes, sizes) for piece in pieces]
    alone = [fused_bytes(piece, sizes) for piece in pieces]
    extra = 0
    if evidence.rewritten is not None:
        extra = max(0, cost(evidence.rewritten.graph.nodes, sizes)[1] - alone[0])
    bytes_now = sum(moved for _, moved in now)
    bytes_after = min(bytes_now, sum(alone) + extra * len(pieces))
    launches_now, launches_after = sum(count for count, _ in now), evidence.launches * len(pieces)
    saving = machine.microseconds(launches_now - launches_after, bytes_now - bytes_after)
    share = saving / step.microseconds if step.microseconds else 0.0
    return Estimate(step.tokens, launches_now, launches_after, bytes_now, bytes_after, saving, share)
