"""The results of a whole model, before and after the transforms, in one dtype after another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch.fx import GraphModule

from graft.base.device_memory import free_memory, size_text
from graft.base.files import Progress
from graft.passes.numeric.compare import CEILING
from graft.workbench.check.bisect import Bisection, bisect
from graft.workbench.check.line import CheckLine
from graft.workbench.check.outputs import StepLogits, distance, limit
from graft.workbench.check.request import CheckRequest
from graft.workbench.check.scenario import Scenario, logits
from graft.workbench.check.trial import CheckTrial, try_model

APART = 1.5  # two results with roundings of their own are √2 times as far from each other as from float64


def in_other_dtypes(
    name: str, own: CheckTrial, request: CheckRequest, scratch: Path, progress: Progress | None
) -> list[tuple[CheckLine, Bisection | None]]:
    """The results of the model in `request.dtypes`, beside those of its own dtype: the graphs have other casts."""
    found: list[tuple[CheckLine, Bisection | None]] = []
    needed = sum(tensor.numel() for tensor in own.state.values()) * 4
    for dtype in request.dtypes if own.state else ():
        if dtype != own.run.manifest.dtype:
            if (free := free_memory(torch.device("cpu"))) < needed:
                told = f"another copy of the model takes up to {size_text(needed)}, {size_text(free)} are free"
                found.append((CheckLine(f"in {dtype}", "skip", told), None))
                continue
            trial = try_model(
                name, request.running, scratch / f"in_{dtype}", dtype=dtype, progress=progress,
                trust_remote_code=request.trust_remote_code, other_devices=request.other_devices,
            )  # fmt: skip
            trial = replace(trial, wrong_matches=own.wrong_matches)  # found in every dtype, by the numeric check
            outputs = StepLogits(trial.run, trial.state, fresh=True)
            line, culprits = end_to_end(trial, outputs, limit(trial.run, getattr(torch, dtype)))
            found.append((CheckLine(f"in {dtype}", line.verdict, line.reason), culprits))
    return found


def end_to_end(trial: CheckTrial, outputs: StepLogits, allowed: float) -> tuple[CheckLine, Bisection | None]:
    """The results after the last transform against those of the captured graph, and where it goes wrong if it does.

    Where a transform changes numbers on purpose, its results are what those after it are held to.
    """
    if outputs.problem:
        return CheckLine("end to end", "skip", outputs.problem), None
    if not bool(outputs.after(0).isfinite().all()):
        return CheckLine("end to end", "skip", f"the model itself overflows in {trial.run.manifest.dtype}"), None
    steps = trial.run.steps
    starts = [0, *(step.number for step in steps if step.transform in trial.on_purpose)]
    stops = [*(start - 1 for start in starts[1:]), steps[-1].number]
    worst = 0.0
    for start, stop in zip(starts, stops, strict=True):
        error = distance(outputs.after(stop), outputs.after(start))
        if error > allowed:
            allowed = max(allowed, own_limit(trial.captured, outputs.after(0), outputs.scenario))
        if error > allowed:
            text = f"results after {steps[stop].transform} are off by {error:.1e} of the largest"
            found = bisect(trial, outputs, allowed, start, stop)
            return CheckLine(
                "end to end", "fail", f"{text}, {allowed:.1e} is allowed; first bad: {culprit(found)}"
            ), found
        worst = max(worst, error)
    apart = f"; {', '.join(sorted(trial.on_purpose))} changes numbers on purpose" if trial.on_purpose else ""
    return CheckLine("end to end", "pass", agreement(worst, allowed) + apart), None


def agreement(error: float, allowed: float) -> str:
    return f"results are off by {error:.1e} of the largest, {allowed:.1e} is allowed"


def own_limit(captured: GraphModule | None, results: torch.Tensor, scenario: Scenario) -> float:
    """How far from the captured graph's results others may be, by how far those are from float64: a deep model in
    16 bits is further off than the roundings of one op."""
    if captured is None:
        return 0.0
    own = distance(results.double(), logits(captured, scenario, exact=True))
    return min(APART * own, CEILING)


def culprit(found: Bisection) -> str:
    """`fuse_rope, match 3 of 4 at %rope (model.layers.1.self_attn, …)`."""
    if not found.match:
        return f"{found.transform} ({found.why_no_match})"
    told = f"{found.transform}, match {found.number} of {found.matches} at {found.match}"
    return f"{told}, wrong by itself; {found.exposed_by} is right and makes it show" if found.exposed_by else told
