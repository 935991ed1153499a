"""What to do about a candidate, and what speaks for and against it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule

from graft.ir.effects import is_mutating
from graft.ir.io.text import abstract_text
from graft.ir.nodes import is_op, static_int, tensor_val, val
from graft.passes.elementwise import is_pointwise, steps_of
from graft.workbench.discover.calls import is_free, is_matmul, readers, through_views
from graft.workbench.discover.known import COMPARED, Uncompared
from graft.workbench.discover.lookup import Existing, transform_sites

if TYPE_CHECKING:
    from graft.workbench.discover.candidates import Candidate
    from graft.workbench.discover.regions import CandidateRegion

WORTH = 0.01  # of the modelled step, at any count of tokens: less is below what a measurement can show


@dataclass(frozen=True)
class CandidateEvidence:
    """What is known about a candidate. `existing` computes all of it, `partly` some of its calls; `rewritten` is the
    piece after graft's transforms, `launches` what is left of it; `on_gpu`: enabled transforms that take it there."""

    existing: tuple[Existing, ...]
    subgraph: GraphModule
    rewritten: GraphModule | None = None
    launches: int = 1
    partly: tuple[Existing, ...] = ()
    covered: int = 0
    misses: tuple[str, ...] = ()
    on_gpu: tuple[str, ...] = ()
    unseen: Uncompared = COMPARED  # with ATen, Inductor and installed ops


def judge(candidate: Candidate, evidence: CandidateEvidence) -> dict[str, Any]:
    recommendation, reason = verdict(candidate, evidence)
    return {
        "recommendation": recommendation,
        "reason": reason,
        "next_step": evidence.unseen.next_step if not evidence.existing else "",
        "strengths": tuple(strengths(candidate, evidence)),
        "weaknesses": tuple(weaknesses(candidate, evidence)),
        "risks": tuple(risks(candidate)),
    }


def verdict(candidate: Candidate, evidence: CandidateEvidence) -> tuple[str, str]:
    best = max(estimate.share for estimate in candidate.estimates)
    if evidence.on_gpu:
        verb = "takes" if len(evidence.on_gpu) == 1 else "take"
        return "defer", f"{' and '.join(evidence.on_gpu)} {verb} it on a GPU, enabled already"
    if candidate.kind == "position_table" and not evidence.existing:
        return "defer", "it is computed from the positions once a step, whatever the depth"
    if best < WORTH:
        return "defer", f"it is {best:.2%} of the step, less than the {WORTH:.0%} that a measurement can show"
    if evidence.unseen.reason and not evidence.existing:
        return (
            "defer",
            f"whether a kernel exists is not known: {evidence.unseen.reason}; next: {evidence.unseen.next_step}",
        )
    if evidence.existing:
        first = evidence.existing[0]
        by = f" ({', '.join(first.transforms)})" if first.transforms else ""
        calls = candidate.pieces[0].launches()
        if evidence.partly and first in evidence.partly:
            return "use_existing_kernel", f"{first.symbol}{by} computes {evidence.covered} of its {calls} calls"
        return "use_existing_kernel", f"{first.symbol}{by} computes all of it"
    return "needs_triton_fallback", "no kernel of graft, ATen or Inductor's patterns computes it as a whole"


def strengths(candidate: Candidate, evidence: CandidateEvidence) -> list[str]:
    found = []
    if candidate.count > 1:
        found.append(f"one kernel serves {candidate.count} sites")
    for existing in evidence.existing:
        if existing.transforms:
            found.append(f"written already: {', '.join(transform_sites(existing.transforms))}")
    last = candidate.estimates[-1]
    if last.bytes_now > 2 * last.bytes_after:
        found.append(
            f"moves {last.bytes_now / max(last.bytes_after, 1):.1f} times fewer bytes"
            f" at {last.tokens} token{'s' * (last.tokens != 1)}"
        )
    if not evidence.existing and generated(candidate.pieces[0]):
        found.append(f"all its calls can be generated: graft new-transform NAME --from {candidate.id} --op")
    further = next_matmul(candidate.pieces[0])
    if further:
        found.append(f"could go into {further}; that saves one more launch a site")
    return found


def weaknesses(candidate: Candidate, evidence: CandidateEvidence) -> list[str]:
    found = []
    if candidate.count == 1:
        found.append("it is there once: the saving does not grow with the depth")
    if evidence.partly:
        calls_now = candidate.pieces[0].launches()
        names = ", ".join(dict.fromkeys(e.symbol for e in evidence.partly))
        found.append(f"{names} takes {evidence.covered} of its {calls_now} calls; one new kernel would take them all")
    found += [f"{existing.symbol}: {existing.note}" for existing in evidence.existing if existing.note]
    if evidence.unseen.reason and not evidence.existing:
        found.append(f"not compared by value with ATen, Inductor and installed ops: {evidence.unseen.reason}")
    found += [f"refused so far: {miss}" for miss in evidence.misses[:3]]
    return found


def risks(candidate: Candidate) -> list[str]:
    piece = candidate.pieces[0]
    found = []
    inner = [node for node in piece.outputs() if any(user in piece.nodes for user in node.users)]
    if inner:
        found.append(f"second readers: %{inner[0].name} is read inside and outside, so the kernel must return it too")
    if any(one.outputs() and len(one.outputs()) != len(piece.outputs()) for one in candidate.pieces):
        found.append("not every site reads every result")
    values = [tensor_val(node) for node in (*piece.inputs(), *piece.nodes)]
    tensors = [value for value in values if value is not None]
    if any(static_int(size) is None for tensor in tensors for size in tensor.shape):
        found.append("dynamic shapes: batch and length are known at run time only")
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    if len(dtypes) > 1:
        names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        found.append(f"precision casts: {names}; the kernel must round where the model does")
    narrow = any(dtype.itemsize < 4 for dtype in dtypes)
    if narrow and candidate.existing and candidate.existing[0].where != "graft":
        found.append(f"{candidate.existing[0].symbol} was compared in float64; in 16 bits it may round elsewhere")
    if writes_between(piece):
        found.append("mutation in between: the graph writes memory between its first and last call")
    if any(is_op(node, torch.ops.aten.dropout.default) for node in piece.nodes):
        found.append("dropout: it must stay away in training")
    shapes = {abstract_text(val(one.nodes[-1])) for one in candidate.pieces}
    if len(shapes) > 1:
        found.append(f"{len(shapes)} different sizes among its sites")
    return found


def writes_between(piece: CandidateRegion) -> bool:
    inside, node = set(piece.nodes), piece.nodes[0]
    while node is not piece.nodes[-1]:
        if node not in inside and is_mutating(node):
            return True
        node = node.next
    return False


def generated(piece: CandidateRegion) -> bool:
    """Whether the elementwise table can say all of it."""
    working = [node for node in piece.nodes if not is_free(node)]
    return all(is_pointwise(node) and not isinstance(steps_of(node), str) for node in working)


def next_matmul(piece: CandidateRegion) -> str:
    """The GEMM that the piece could become a part of, in words."""
    working = [node for node in piece.nodes if not is_free(node)]
    if any(is_matmul(node) for node in working) or piece.kind in ("attention_neighbour", "experts"):
        return ""
    before = [through_views(a) for a in piece.inputs() if is_matmul(through_views(a))]
    if before and all(is_pointwise(node) for node in working) and piece.kind == "gemm_epilogue":
        return f"the GEMM that it reads (%{before[0].name}), as its epilogue"
    read = [reader for node in piece.outputs() for reader in readers(node) if reader not in piece.nodes]
    if read and all(is_matmul(reader) for reader in read):
        return f"the GEMM that reads it (%{read[0].name}), as its prologue"
    return ""
