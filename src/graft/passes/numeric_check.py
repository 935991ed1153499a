"""The numeric check of each match: what was replaced and what replaced it, run side by side.

Both run on the same inputs, at the sizes of a decode step and of a prompt, in every dtype, on strided tensors and on
ordinary and extreme values (passes/numeric/trials.py). What was replaced also runs in float64, and how far it is from
that itself says how far the replacement may be (compare.py). Inputs and weights are compared afterwards, and a second
run must give the same. A match that fails takes its whole transform back. Equal layers are tried once (kinds.py), and
not again in a later run (stored.py); what could not be tried is told with the result. What can be proved without
running it is marked so (proofs.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graft.base.errors import NumericCheckError
from graft.ir.canonical.normal_form import is_random
from graft.ir.evaluate import Subprogram
from graft.ir.nodes import leaves, val
from graft.ir.verify import GraphSnapshot
from graft.passes.numeric.activations import PromptActivations
from graft.passes.numeric.compare import Difference, close, difference
from graft.passes.numeric.execution import RUN_ERRORS, Execution, first_line, in_float64, tensors
from graft.passes.numeric.inputs import PieceWeights, TrialInputs, WideInputs, same
from graft.passes.numeric.kinds import flat_left_out, flat_storages, kind_of, rounds_weights, weights_differ
from graft.passes.numeric.layouts import RECORDED_LAYOUT
from graft.passes.numeric.proofs import proof_of
from graft.passes.numeric.sides import Sides
from graft.passes.numeric.sizes import RECORDED, SWEPT, open_sizes
from graft.passes.numeric.stored import StoredChecks, pair_facts
from graft.passes.numeric.trials import ACTIVATIONS, NumericTrial, dtypes_of, further_trials, needed_trials
from graft.passes.report import MatchRecord, NumericCheck

KEPT: Mapping[str, str] = {}
WORK = 400_000_000  # multiplications and elements a kind of match may take for the sizes that are tried where cheap


def check_matches(
    gm: GraphModule,
    before: GraphSnapshot,
    records: Sequence[MatchRecord],
    most: int | None = None,
    not_kept: Mapping[str, str] = KEPT,
) -> tuple[MatchRecord, ...]:
    """The records with the check of each; the first replacement that computes something else is a NumericCheckError.

    A transform that changes numbers on purpose brings its own check, of what it may change. most: no size of an input
    is larger (the context of a decoder). not_kept: as in BaseTransform.
    """
    sides = Sides.of(gm, before, records)
    sides.check_rewiring()
    checker = MatchTrials(sides, most, not_kept)
    return tuple(r if r.numeric_check else checker.checked(r) for r in records)


@dataclass
class MatchTrials:
    """Tries the matches of one transform."""

    sides: Sides
    most: int | None = None
    not_kept: Mapping[str, str] = field(default_factory=dict)
    known: dict[str, NumericCheck] = field(default_factory=dict)
    proofs: dict[str, str] = field(default_factory=dict)

    @cached_property
    def activations(self) -> PromptActivations:
        return PromptActivations(self.sides)

    @cached_property
    def stored(self) -> StoredChecks:
        return StoredChecks({"check": PairTrials, "activations": PromptActivations})

    def checked(self, record: MatchRecord) -> MatchRecord:
        """With its check, and with what was proved of it: what is proved is run, too."""
        check = self.check(record)
        old, new = self.sides.pieces(record)
        kind = kind_of(old, new)
        if kind not in self.proofs:
            self.proofs[kind] = proof_of(old, new)
        return replace(record, numeric_check=check, proved=self.proofs[kind])

    def check(self, record: MatchRecord) -> NumericCheck:
        old, new = self.sides.pieces(record)
        if not old.outputs:
            raise NumericCheckError(f"the match at {record.anchor} replaced nothing that the graph reads")
        kind = kind_of(old, new)
        if kind not in self.known:
            given = self.activations.at(list(dict.fromkeys([*old.shared(), *new.shared()])))
            trials = PairTrials(old, new, record.anchor, self.most, given, self.activations.lacking)
            self.known[kind] = self.stored.result(
                lambda: pair_facts(old, new, f"{kind} {trials.lacking}", self.most, self.not_kept, given),
                lambda: trials.all(self.not_kept),
            )
        elif weights_differ(old, new):
            once = PairTrials(old, new, record.anchor, self.most)
            self.stored.result(lambda: pair_facts(old, new, f"{kind} once", self.most, {}, {}), once.once)
        return self.known[kind]


class PairTrials:
    """One pair of pieces, and what came of the trials so far."""

    def __init__(
        self,
        old: Subprogram,
        new: Subprogram,
        anchor: str,
        most: int | None,
        given: Mapping[Node, Any] | None = None,
        lacking: str = "",
    ) -> None:
        """given: activations of a prompt; lacking: why there are none, where there could be."""
        self.old, self.new, self.anchor, self.lacking = old, new, anchor, lacking
        self.boundary = list(dict.fromkeys([*old.shared(), *new.shared()]))
        self.given = {n: given[n] for n in self.boundary if n in given} if given else {}
        self.own = own_dtype(self.boundary, old, new)
        self.upper = open_sizes(self.boundary, most)
        flat = flat_storages(old, new)
        self.weights, self.varied = PieceWeights(), PieceWeights(flat) if flat else None
        self.random = any(is_random(node) for node in (*old.program, *new.program))
        self.declared = old.written() | new.written()
        # a table in 16 bits is as good as it gets there, and not in float32
        self.rounded = self.own in (torch.bfloat16, torch.float16) and rounds_weights(old, new)
        self.widens = self.own is torch.float32 and becomes_complex(old)
        self.worst, self.worst_trial = Difference(), NumericTrial(dtype=self.own)
        self.skipped: dict[str, list[NumericTrial]] = {}
        self.tried: list[NumericTrial] = []
        self.work = 0

    def once(self) -> NumericCheck:
        self.try_one(NumericTrial(dtype=self.own))
        return self.result()

    def all(self, not_kept: Mapping[str, str] = KEPT) -> NumericCheck:
        for trial in needed_trials(self.own, self.upper):
            if trial.values in not_kept:
                self.skip(trial, not_kept[trial.values])
            else:
                self.try_one(trial)
        for dtype in dtypes_of(self.own) if self.varied else ():
            self.try_one(NumericTrial(dtype=dtype, varied=True))
        if self.given:
            self.try_one(NumericTrial(ACTIVATIONS, self.own))
        elif self.lacking:
            self.skip(NumericTrial(ACTIVATIONS, self.own), self.lacking)
        self.work = 0
        for trial in further_trials(self.own, self.upper):
            if self.work < WORK:
                self.try_quickly(trial)
            else:
                self.skipped.setdefault("they would take too long", []).append(trial)
        return self.result()

    def result(self) -> NumericCheck:
        told = tuple(f"{some(trials)}: {reason}" for reason, trials in self.skipped.items())
        fixed = () if self.upper else ("other sizes: the graph has none that is open",)
        left_out = [str(tuple(tensor.shape)) for tensor in flat_left_out(self.old, self.new)]
        if left_out:
            fixed += (
                f"other values of weights that it does not read, each the same throughout: {', '.join(left_out)}",
            )
        return NumericCheck(
            self.worst.error, self.worst.limit, self.worst_trial.text.removesuffix(")").replace(" inputs (", ", "),
            trials=len(self.tried), uncovered=(*told, *fixed),
        )  # fmt: skip

    def try_one(self, trial: NumericTrial) -> None:
        if self.widens and trial.dtype is not self.own:
            self.skip(trial, "torch widens complex numbers of 16 bits by itself")
            return
        retype = {self.own: trial.dtype} if self.own and trial.dtype and trial.dtype is not self.own else {}
        given = self.given if trial.values == ACTIVATIONS else {}
        weights = self.varied if trial.varied and self.varied else self.weights
        inputs = TrialInputs(trial, weights, retype, given, copy_weights=not self.tried or bool(self.declared))
        execution = Execution(retype)
        with torch.no_grad():
            try:
                exact = self.old.run(WideInputs(inputs), in_float64)
                was = self.old.run(inputs, execution.call)
            except Exception as error:
                if not self.tried:
                    raise
                self.skip(trial, f"what was replaced does not run so ({first_line(error)})")
                return
            self.work += execution.work
            found = self.compare_runs(trial, inputs, exact, was, execution)
        if found is not None:
            self.tried.append(trial)
            if found.limit and found.error / found.limit > self.share:
                self.worst, self.worst_trial = found, trial

    def try_quickly(self, trial: NumericTrial) -> None:
        """Without float64 where both give nearly the same: one of hundreds of sizes."""
        if trial.dtype is not self.own or max(trial.sizes.values()) > SWEPT:
            self.try_one(trial)
            return
        inputs, execution = TrialInputs(trial, self.weights, {}), Execution()
        with torch.no_grad():
            try:
                was = self.old.run(inputs, execution.call)
                inputs.forget()
                now = self.new.run(inputs, execution.run)
            except RUN_ERRORS:
                self.try_one(trial)  # says which of the two does not run
                return
        pairs = list(zip(tensors(was), tensors(now), strict=True))
        if inputs.changed(self.declared) or not all(close(one, other, execution) for one, other in pairs):
            self.try_one(trial)
            return
        self.work += execution.work
        self.tried.append(trial)

    @property
    def share(self) -> float:
        return self.worst.error / self.worst.limit if self.worst.limit else -1.0

    def compare_runs(
        self, trial: NumericTrial, inputs: TrialInputs, exact: list[Any], was: list[Any], execution: Execution
    ) -> Difference | None:
        """The worst output; None where the trial says nothing. The replacement runs twice in the first trials."""
        now = None
        for again in (False, True):
            inputs.forget()
            try:
                made = self.new.run(inputs, Execution(inputs.retype).run)
            except Exception as error:
                if trial.dtype is self.own and trial.layout == RECORDED_LAYOUT:
                    raise NumericCheckError(
                        f"the replacement at {self.anchor} does not run on {trial.text}, where what it replaced does:"
                        f" {first_line(error)}"
                    ) from error
                self.skip(trial, f"the replacement does not run so ({first_line(error)})")
                return None
            if changed := inputs.changed(self.declared):
                raise NumericCheckError(
                    f"the replacement at {self.anchor} writes into {changed}, on {trial.text}, and no schema declares"
                    " that; declare it in mutates_args, or copy before writing"
                )
            if self.overflows(trial, was, made):
                return None
            found = self.worst_output(trial, exact, was, made, execution, "in a second run " if again else "")
            if found is None or again or self.random or not self.repeats(trial):
                return found
            now = made
        if not same(now, made):
            self.skip(trial, "two runs on the same inputs differ within the tolerance: it is not deterministic")
        return found

    def repeats(self, trial: NumericTrial) -> bool:
        """State and chance show in a second run; one for each kind of values and size will do."""
        return trial.dtype is self.own and (trial.sizes == RECORDED or len(self.tried) < 60)

    def worst_output(
        self, trial: NumericTrial, exact: list[Any], was: list[Any], now: list[Any], execution: Execution, when: str
    ) -> Difference | None:
        differences = [Difference()]
        for right, first, second in zip(tensors(exact), tensors(was), tensors(now), strict=True):
            found = difference(right, first, second, execution)
            if found.wrong and self.rounded and trial.dtype is not self.own:
                self.skip(trial, "a weight that the transform made is rounded to the graph's own dtype")
                return None
            if found.wrong:
                raise NumericCheckError(
                    f"the replacement at {self.anchor} is {when}{found.what} by {found.error:.2e} on {trial.text},"
                    f" where {found.limit:.2e} is allowed (reductions of {execution.longest})"
                )
            if found.unclear:
                self.skip(trial, found.unclear)
                return None
            differences.append(found)
        return max(differences, key=lambda one: one.error / one.limit if one.limit else 0.0)

    def overflows(self, trial: NumericTrial, was: list[Any], now: list[Any]) -> bool:
        """Large values in a dtype that is not the graph's own: where it ends is no property of the rewrite."""
        if trial.dtype is self.own or trial.values != "large":
            return False
        pairs = zip(tensors(was), tensors(now), strict=True)
        if not any(bool((torch.isfinite(one) & ~torch.isfinite(other)).any()) for one, other in pairs):
            return False
        self.skip(trial, "the replacement overflows where the original just does not")
        return True

    def skip(self, trial: NumericTrial, reason: str) -> None:
        self.skipped.setdefault(reason, []).append(trial)


def own_dtype(boundary: Iterable[Node], old: Subprogram, new: Subprogram) -> torch.dtype | None:
    """The coarsest floating dtype that the pair is given: that of the model. Others in it are on purpose."""
    found = {value.dtype for node in boundary for value in leaves(val(node)) if isinstance(value, torch.Tensor)}
    for piece in (old, new):
        calls = (piece.calls[node] for node in piece.program if piece.boundary(node) is None)
        found |= {piece.attributes(str(call.target)).dtype for call in calls if call.op == "get_attr"}
    known = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    return next((dtype for dtype in known if dtype in found), None)


def becomes_complex(piece: Subprogram) -> bool:
    values = (value for node in piece.program for value in leaves(val(node)))
    return any(isinstance(value, torch.Tensor) and value.is_complex() for value in values)


def some(trials: Sequence[NumericTrial]) -> str:
    """`random inputs (float16, …)` and how many more."""
    more = f" and {len(trials) - 1} more" if len(trials) > 1 else ""
    return f"{trials[0].text}{more}"
