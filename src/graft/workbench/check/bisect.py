"""Finds the first bad transform, and in it the first bad match, by halves.

Assumed: once the results are bad they stay bad, whatever is applied on top. Where that does not hold (two mistakes
that cancel out), what is found is still a step before which the results were good and after which they are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from graft.base.errors import NumericCheckError, VerificationError
from graft.ir.edit import second_module
from graft.ir.verify import GraphSnapshot
from graft.memory.verify import Uses
from graft.passes.dumps import DumpWriter
from graft.passes.partial import with_matches
from graft.passes.pipeline import order_transforms, run_one, run_pipeline
from graft.passes.registry import TransformRegistry
from graft.workbench.check.outputs import StepLogits, distance
from graft.workbench.check.scenario import logits
from graft.workbench.check.trial import CheckTrial


@dataclass(frozen=True)
class Bisection:
    """The first bad transform, the first bad match in it, and what it took.

    runs: graphs that were run; at most `bound`. error: after the transform; limit: what is allowed. match: '' where
    matches could not be told apart, for the reason in `why_no_match`. exposed_by: the transform behind which the
    results are bad, where that one is right and hands other values, sizes or layouts to one before it that is not.
    """

    transform: str
    error: float
    limit: float
    match: str = ""
    module: str = ""
    number: int = 0  # of the match, from 1
    matches: int = 0
    runs: int = 0
    bound: int = 0
    why_no_match: str = ""
    exposed_by: str = ""


def first_bad(count: int, bad: Callable[[int], bool]) -> int:
    """The smallest k in 1…count with bad(k), where bad(0) is false and bad(count) true; calls: ceil(log2(count))."""
    good = 0
    while count - good > 1:
        middle = (good + count) // 2
        if bad(middle):
            count = middle
        else:
            good = middle
    return count


def bound(transforms: int, matches: int) -> int:
    """The first and the last graph, then halves; of matches the halves alone: none and all of them are known."""
    return 2 + halves(transforms) + halves(matches)


def halves(count: int) -> int:
    return math.ceil(math.log2(count)) if count > 1 else 0


def bisect(trial: CheckTrial, outputs: StepLogits, allowed: float, start: int, stop: int) -> Bisection:
    """Between step `start`, whose results are good, and step `stop`, whose results are further off than `allowed`."""
    run, before = trial.run, outputs.runs - 2  # both were run to see that something is wrong
    reference = outputs.after(start)
    # steps that changed nothing are not worth a run
    steps = [s.number for s in run.steps[start + 1 : stop + 1] if outputs.source(s.number).number == s.number]
    index = first_bad(len(steps), lambda k: distance(outputs.after(steps[k - 1]), reference) > allowed)
    step = run.steps[steps[index - 1]]
    record = run.report.transforms[step.transform]
    found = Bisection(
        step.transform, distance(outputs.after(step.number), reference), allowed, matches=len(record.matches)
    )
    found = wrong_before(trial, found, start, step.number) or first_match(trial, outputs, found, step.number)
    return replace(found, runs=outputs.runs - before, bound=bound(len(steps), len(record.matches)))


def wrong_before(trial: CheckTrial, found: Bisection, start: int, number: int) -> Bisection | None:
    """A match of an earlier transform that is wrong by itself, where none of this one is: its fault lies in inputs
    that the graph has only from here on, such as the strides of a merged projection's parts."""
    if trial.wrong_matches.get(found.transform):
        return None
    for step in trial.run.steps[start + 1 : number]:
        for wrong in trial.wrong_matches.get(step.transform, ()):
            matches = trial.run.report.transforms[step.transform].matches
            index = next((i for i, match in enumerate(matches, 1) if match.anchor == wrong.match), 0)
            if index:
                return replace(
                    found, transform=step.transform, match=wrong.match, module=matches[index - 1].module,
                    number=index, matches=len(matches), exposed_by=found.transform,
                )  # fmt: skip
    return None


def first_match(trial: CheckTrial, outputs: StepLogits, found: Bisection, number: int) -> Bisection:
    if trial.captured is None:
        return replace(
            found, why_no_match="dumps hold whole transforms; check the model itself to tell matches apart"
        )
    if TransformRegistry.get(found.transform).uncheckable:
        return replace(found, why_no_match="it changes the graph as a whole, so its matches do not stand alone")
    reference = outputs.after(number - 1)
    replay = TransformReplay(trial, found.transform)

    def bad(kept: int) -> bool:
        outputs.runs += 1
        gm = with_matches(replay.gm, replay.before, replay.matches, range(kept), replay.uses)
        return distance(logits(gm, outputs.scenario), reference) > found.limit

    if not distance(outputs.after(number), reference) > found.limit:
        return replace(found, why_no_match="no step is bad by itself; the roundings of several add up")
    try:
        index = first_bad(len(replay.matches), bad)
    except (NumericCheckError, VerificationError) as error:
        return replace(found, why_no_match=str(error))
    match = replay.matches[index - 1]
    return replace(found, match=match.anchor, module=match.module, number=index)


class TransformReplay:
    """The graph just before and just after one transform, made once more from the captured one."""

    def __init__(self, trial: CheckTrial, name: str) -> None:
        assert trial.captured is not None
        self.gm = second_module(trial.captured)
        context = trial.fresh_context()
        names = order_transforms(trial.config)
        earlier = names[: names.index(name)]
        kept = {n: replace(s, enabled=s.enabled and n in earlier) for n, s in trial.config.transforms.items()}
        run_pipeline(self.gm, replace(trial.config, transforms=kept), context, dump_dir=DumpWriter())
        self.before, self.uses = GraphSnapshot.take(self.gm), Uses.take(self.gm.graph)
        settings = trial.config.transforms[name]
        self.matches = run_one(self.gm, TransformRegistry.get(name)(settings), settings, context).matches
