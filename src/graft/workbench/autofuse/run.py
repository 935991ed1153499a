"""The loop: candidates by estimated saving, each written, put on trial, and kept where it pays."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from graft.base.errors import ExtraMissing, GraftError, UsageError
from graft.base.files import Progress, write_whole
from graft.bench.limits.machine import facts
from graft.models.places import resolve_device
from graft.workbench.autofuse.engines import candidates_of
from graft.workbench.autofuse.ledger import CandidateOutcome, Ledger, Status, on_machine, open_ledger
from graft.workbench.autofuse.process import run_trial
from graft.workbench.autofuse.request import AutofuseRequest, check_request
from graft.workbench.autofuse.table import table_text
from graft.workbench.autofuse.timing import ShapeTimes, verdict
from graft.workbench.autofuse.trial import TrialOrder
from graft.workbench.autofuse.writing import CandidateWriter
from graft.workbench.discover import Candidate
from graft.workbench.discover.sources import is_run
from graft.workbench.scaffold.destination import Destination
from graft.workbench.scaffold.plan import Written

Tell = Callable[[CandidateOutcome], None]
LEAST = 20.0  # seconds: less is not enough to import torch, capture and compile
TABLE = "AUTOFUSE.md"


def autofuse(request: AutofuseRequest, tell: Tell | None = None, progress: Progress | None = None) -> Ledger:
    """Writes the package, and in it what became of each candidate; goes on where an earlier run was interrupted."""
    check_request(request)
    if is_run(request.model):
        raise UsageError(f"{request.model} is a folder of dumps, and dumps cannot be measured; name the model")
    if find_spec("pytest") is None:
        raise ExtraMissing("graft autofuse", "dev", "pytest")
    final = Destination.in_package(request.package)
    ledger = open_ledger(final.root, request.kind())
    ledger = on_machine(ledger, final.root, facts(resolve_device(request.device)))
    started = time.monotonic()
    found = candidates_of(request, progress)
    ledger = replace(ledger, facts={**ledger.facts, "model": found.model})
    tried = 0
    for candidate in found.candidates:
        known = ledger.find(candidate.id)
        if known is not None and known.decided:
            continue
        left = time_left(request, started)
        why = skipped(request, candidate, ledger, tried, left)
        if why:
            outcome = replace(blank(candidate), status=why[0], reason=why[1])
        else:
            tried += 1
            if progress:
                progress(f"{candidate.id} {candidate.title}", tried - 1, request.steps or len(found.worthwhile))
            outcome = try_candidate(request, candidate, found.model, final, ledger, min(left, request.limit))
        ledger = ledger.having(outcome)
        save(ledger, final)
        if tell and not why:
            tell(outcome)
    save(ledger, final)
    return ledger


def save(ledger: Ledger, final: Destination) -> None:
    ledger.save(final.root)
    write_whole(final.root / TABLE, table_text(ledger))


def time_left(request: AutofuseRequest, started: float) -> float:
    if request.steps is not None or request.budget is None:
        return float("inf")
    return request.budget - (time.monotonic() - started)


def skipped(
    request: AutofuseRequest, candidate: Candidate, ledger: Ledger, tried: int, left: float
) -> tuple[Status, str] | None:
    unsure = request.own and candidate.next_step  # a kernel may exist, and one of its own was asked for
    if candidate.recommendation == "defer" and not unsure:
        return "deferred", candidate.reason
    narrow = ledger.find(candidate.over)
    if narrow is not None and narrow.status == "not tried":  # what it is compared with is not known yet
        return "not tried", f"it takes a GEMM with {candidate.over}, which was not tried"
    if request.steps is not None and tried >= request.steps:
        return "not tried", f"--steps {request.steps} were taken; run it again to go on"
    if left < LEAST:
        return "not tried", "the budget is spent; run it again to go on"
    return None


def blank(candidate: Candidate) -> CandidateOutcome:
    return CandidateOutcome(
        candidate.id, candidate.title, candidate.kind, candidate.count,
        tuple(round(e.saving_us, 3) for e in candidate.estimates), tuple(e.share for e in candidate.estimates),
        "not tried", "", over=candidate.over,
    )  # fmt: skip


def try_candidate(
    request: AutofuseRequest, candidate: Candidate, model: str, final: Destination, ledger: Ledger, limit: float
) -> CandidateOutcome:
    started = time.monotonic()
    narrow = ledger.find(candidate.over)
    ahead_of = (narrow.transform,) if narrow is not None and narrow.status == "kept" else ()
    writer = CandidateWriter(candidate, model, request.own, ahead_of)
    outcome = replace(blank(candidate), transform=writer.name)
    with tempfile.TemporaryDirectory(prefix="graft-autofuse-") as scratch:
        place = Destination.in_package(Path(scratch) / f"trial-{candidate.id}")
        try:
            written, path, note = writer.trial(place)
        except GraftError as error:
            return replace(outcome, status="refused", reason=one_line(error), seconds=since(started))
        kernels = tuple(
            name for name, file in (("native", "native.h"), ("triton", "triton.py")) if has(written, file)
        )
        order = order_of(request, writer, written, place, final, ledger)
        search = [place.source.parent, *([final.source.parent] if ledger.kept else [])]
        data = run_trial(order, search, limit)
        outcome = replace(outcome, path=path, kernels=kernels, checks=tuple(data["checks"]), seconds=since(started))
        if data["failure"]:
            if data["phase"] == "out of time" and limit < request.limit:
                return replace(outcome, status="not tried", reason="the budget ended while it was tried")
            status = ENDED.get(data["phase"], "failed")
            return replace(outcome, status=status, reason=one_line(data["failure"]))
        times = tuple(ShapeTimes.of(one) for one in data["times"])
        pays, told = verdict(times, request.gain)
        outcome = replace(outcome, times=times, reason=f"{told}{note}", status="kept" if pays else "no gain")
        if pays:
            keep(writer, final, order, op=bool(written.op))
    return replace(outcome, seconds=since(started))


ENDED: dict[str, Status] = {"wrong": "wrong", "nothing left": "no gain"}


def order_of(
    request: AutofuseRequest,
    writer: CandidateWriter,
    written: Written,
    place: Destination,
    final: Destination,
    ledger: Ledger,
) -> TrialOrder:
    packages = [str(final.source)] if ledger.kept else []
    return TrialOrder(
        request.model, writer.name, written.op, writer.shapes(), (*packages, str(place.source)),
        str(place.test(writer.name)), str(place.root / "note.md"), str(resolve_device(request.device)),
        request.backend, request.dtype, request.config, request.sets, request.plugins, request.prompt,
        request.new, request.repeats, request.trust_remote_code,
    )  # fmt: skip


def keep(writer: CandidateWriter, final: Destination, order: TrialOrder, *, op: bool) -> None:
    """The same files in the package, switched on, with the note of the review."""
    writer.keep(final, op=op)
    note = Path(order.note).read_text() if Path(order.note).is_file() else ""
    write_whole(final.root / "notes" / f"{writer.name}.md", note)


def has(written: Written, file: str) -> bool:
    return any(path.name == file for path in written.files)


def since(started: float) -> float:
    return round(time.monotonic() - started, 2)


def one_line(error: object) -> str:
    return " ".join(str(error).split())[:400]
