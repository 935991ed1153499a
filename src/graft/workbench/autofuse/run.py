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
from graft.workbench.autofuse.ledger import CandidateOutcome, KernelPath, Ledger, Status, on_machine, open_ledger
from graft.workbench.autofuse.process import run_trial
from graft.workbench.autofuse.request import AutofuseRequest, check_request
from graft.workbench.autofuse.table import table_text
from graft.workbench.autofuse.timing import ShapeTimes, verdict
from graft.workbench.autofuse.trial import TrialOrder
from graft.workbench.discover import Candidate
from graft.workbench.discover.sources import is_run
from graft.workbench.scaffold.candidate import Seed, seed_of
from graft.workbench.scaffold.destination import Destination
from graft.workbench.scaffold.plan import Written, transform_from

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
        why = skipped(request, candidate, tried, left)
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


def skipped(request: AutofuseRequest, candidate: Candidate, tried: int, left: float) -> tuple[Status, str] | None:
    unsure = request.own and candidate.next_step  # a kernel may exist, and one of its own was asked for
    if candidate.recommendation == "defer" and not unsure:
        return "deferred", candidate.reason
    if request.steps is not None and tried >= request.steps:
        return "not tried", f"--steps {request.steps} were taken; run it again to go on"
    if left < LEAST:
        return "not tried", "the budget is spent; run it again to go on"
    return None


def blank(candidate: Candidate) -> CandidateOutcome:
    return CandidateOutcome(
        candidate.id, candidate.title, candidate.kind, candidate.count,
        tuple(round(e.saving_us, 3) for e in candidate.estimates), tuple(e.share for e in candidate.estimates),
        "not tried", "",
    )  # fmt: skip


def try_candidate(
    request: AutofuseRequest, candidate: Candidate, model: str, final: Destination, ledger: Ledger, limit: float
) -> CandidateOutcome:
    started = time.monotonic()
    outcome = replace(blank(candidate), transform=f"fuse_{candidate.function_name}")
    with tempfile.TemporaryDirectory(prefix="graft-autofuse-") as scratch:
        place = Destination.in_package(Path(scratch) / f"trial-{candidate.id}")
        try:
            seed = seed_of(candidate, model)
            whole = candidate.estimates[0].launches_after <= candidate.count  # by one kernel, not by a part of it
            written, path, note = write_trial(outcome.transform, seed, place, own=request.own or not whole)
        except GraftError as error:
            return replace(outcome, status="refused", reason=one_line(error), seconds=since(started))
        kernels = tuple(
            name for name, file in (("native", "native.h"), ("triton", "triton.py")) if has(written, file)
        )
        order = order_of(request, outcome.transform, written, seed, place, final, ledger)
        search = [place.source.parent, *([final.source.parent] if ledger.kept else [])]
        data = run_trial(order, search, limit)
        outcome = replace(outcome, path=path, kernels=kernels, checks=tuple(data["checks"]), seconds=since(started))
        if data["failure"]:
            status: Status = "wrong" if data["phase"] == "wrong" else "failed"
            if data["phase"] == "out of time" and limit < request.limit:
                return replace(outcome, status="not tried", reason="the budget ended while it was tried")
            return replace(outcome, status=status, reason=one_line(data["failure"]))
        times = tuple(ShapeTimes.of(one) for one in data["times"])
        pays, told = verdict(times, request.gain)
        outcome = replace(outcome, times=times, reason=f"{told}{note}", status="kept" if pays else "no gain")
        if pays:
            keep(outcome, seed, final, order, op=bool(written.op))
    return replace(outcome, seconds=since(started))


def write_trial(name: str, seed: Seed, place: Destination, *, own: bool) -> tuple[Written, KernelPath, str]:
    """With the kernel that exists, where one can be called; else with kernels that are written here."""
    note = ""
    if seed.existing and not own:
        try:
            return transform_from(name, seed, place), "existing_kernel_path", f"; by {seed.existing[0][1]}"
        except GraftError as error:
            note = f"; {seed.existing[0][1]} was not called: {one_line(error)[:160]}"
    return transform_from(name, seed, place, op=True), "triton_fallback_path", note


def order_of(
    request: AutofuseRequest,
    name: str,
    written: Written,
    seed: Seed,
    place: Destination,
    final: Destination,
    ledger: Ledger,
) -> TrialOrder:
    packages = [str(final.source)] if ledger.kept else []
    return TrialOrder(
        request.model, name, written.op, dict(seed.shapes), (*packages, str(place.source)), str(place.test(name)),
        str(place.root / "note.md"), str(resolve_device(request.device)), request.backend, request.dtype,
        request.config, request.sets, request.plugins, request.prompt, request.new, request.repeats,
        request.trust_remote_code,
    )  # fmt: skip


def keep(outcome: CandidateOutcome, seed: Seed, final: Destination, order: TrialOrder, *, op: bool) -> None:
    """The same files in the package, switched on, with the note of the review. A run that was killed in between
    writes them anew."""
    transform_from(outcome.transform, seed, final, op=op, force=True, enabled=True)
    note = Path(order.note).read_text() if Path(order.note).is_file() else ""
    write_whole(final.root / "notes" / f"{outcome.transform}.md", note)


def has(written: Written, file: str) -> bool:
    return any(path.name == file for path in written.files)


def since(started: float) -> float:
    return round(time.monotonic() - started, 2)


def one_line(error: object) -> str:
    return " ".join(str(error).split())[:400]
