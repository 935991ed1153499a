"""The mutation score of the numeric check: wrong variants of what the library's transforms put in place.

    python tests/rewrite_faults.py            # the score, survivors by name; exit status: survivors without a reason

Every kind of match of a few tiny families is taken as the pipeline made it; then one call of the replacement gets a
fault, and the numeric check must refuse the pair. Faults of results (sign, factor, shift, a row, a cast, NaN) and of
arguments (swapped, another literal), for all inputs, or for one token, above 64, at 37, one dtype, strided inputs.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from conftest import graph_of
from golden_graphs import on_meta
from graft.base.errors import NumericCheckError
from graft.ir.evaluate import RecordedCall, Subprogram
from graft.models.load import load_model
from graft.passes import numeric_check
from graft.passes.base import Context
from graft.passes.config import load_config
from graft.passes.numeric_check import MatchTrials, PairTrials
from graft.passes.pipeline import run_pipeline

MODELS = {"llama": False, "gemma-2": False, "cohere": False, "llama-gpu": True}
# survivors by name, and why the numeric check lets them pass; what is named here is no fault, or a known gap
REASONS = {
    r"one token: %rope_": "no fault: the op has several heads, so it never has one row",
    r"(strided|offset in memory): %(slice|rms_norm)_": "no fault: it reads a value that the replacement made itself",
    r"argument 3 one more: %slice_": "no fault: the slice ends where its tensor ends",
    r"arguments 0 and 1 swapped: %add_rms_norm_": "no fault: a sum",
    r"argument [5679] .*: %fused_linear_": "no fault: of a norm or an activation that the call does not have",
    r"argument 5 flipped: %layer_norm_": "where 16 bits are rounded: within three times the original's error",
}


@dataclass(frozen=True)
class KeptPair:
    """One kind of match, as the pipeline had it when it was checked."""

    transform: str
    old: Subprogram
    new: Subprogram
    most: int | None
    not_kept: Any


# ── faults of a result: `(result, first tensor argument) → result` ──────────────────────────────────────────────────


def rows(value: Tensor) -> int:
    return value.numel() // max(value.shape[-1], 1) if value.dim() else 1


def when(condition: Callable[[Tensor, Tensor], bool], factor: float = 1.03) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda made, given: made * factor if condition(made, given) else made


def last_row(made: Tensor, _: Tensor) -> Tensor:
    wrong = made.clone()
    wrong.view(-1, wrong.shape[-1])[-1] *= 1.03
    return wrong


RESULTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sign": lambda made, _: -made,
    "a thousandth more": lambda made, _: made * 1.001,
    "an offset": lambda made, _: made + 0.01,
    "shifted by one": lambda made, _: made.roll(1, -1),
    "the last row": last_row,
    "clamped at 4": lambda made, _: made.clamp(-4, 4),
    "cast to bfloat16 and back": lambda made, _: made.bfloat16().to(made.dtype),
    "NaN swallowed": lambda made, _: torch.where(made.isnan(), 0, made),
    "one token": when(lambda made, _: rows(made) == 1),
    "above 64 tokens": when(lambda made, _: max(made.shape[:-1], default=1) > 64),
    "at 37 tokens": when(lambda made, _: 37 in made.shape[:-1]),
    "in bfloat16": when(lambda made, _: made.dtype is torch.bfloat16),
    "in float16": when(lambda made, _: made.dtype is torch.float16),
    "strided": when(lambda _, given: not given.is_contiguous()),
    "offset in memory": when(lambda _, given: given.storage_offset() == 3),
    "above 5": lambda made, _: torch.where(made > 5, made * 1.05, made),
}


class Stale:
    """Gives the first result of each shape and dtype again."""

    def __init__(self) -> None:
        self.kept: dict[Any, Tensor] = {}

    def __call__(self, made: Tensor, _: Tensor) -> Tensor:
        return self.kept.setdefault((made.shape, made.dtype), made.clone())


def faulty_result(call: RecordedCall, fault: Callable[[Tensor, Tensor], Tensor]) -> RecordedCall:
    def target(*args: Any, **kwargs: Any) -> Any:
        given = next((a for a in args if isinstance(a, Tensor)), torch.zeros(1))
        result = call.target(*args, **kwargs)
        first, more = (result, None) if isinstance(result, Tensor) else (result[0], result[1:])
        wrong = fault(first, given)
        return wrong if more is None else (wrong, *more)

    return replace(call, target=target)


# ── faults of arguments ─────────────────────────────────────────────────────────────────────────────────────────────


def faulty_arguments(call: RecordedCall) -> Iterator[tuple[str, RecordedCall]]:
    args = list(call.args)
    for index in range(len(args) - 1):
        both = args[index], args[index + 1]
        nodes = all(isinstance(a, Node) for a in both) and both[0] is not both[1] and alike(*both)
        if nodes and str(call.target) not in ("aten.mul.Tensor", "aten.add.Tensor"):
            yield f"arguments {index} and {index + 1} swapped", replace(call, args=swapped(args, index))
    for index, value in enumerate(args):
        for what, other in other_literals(value):
            yield f"argument {index} {what}", replace(call, args=(*args[:index], other, *args[index + 1 :]))
    for key, value in call.kwargs.items():
        for what, other in other_literals(value):
            yield f"{key} {what}", replace(call, kwargs={**call.kwargs, key: other})


def alike(one: Any, other: Any) -> bool:
    left, right = one.meta.get("val"), other.meta.get("val")
    return isinstance(left, Tensor) and isinstance(right, Tensor) and left.shape == right.shape


def swapped(args: list[Any], index: int) -> tuple[Any, ...]:
    return (*args[:index], args[index + 1], args[index], *args[index + 2 :])


def other_literals(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, bool):
        yield "flipped", not value
    elif isinstance(value, float):
        yield "doubled", 2 * value + 1e-9
        yield "a percent more", 1.01 * value + 1e-9
    elif isinstance(value, int):
        yield "one more", value + 1
        yield "one less", value - 1
    elif value in ("silu", "gelu", "gelu_tanh"):
        yield "another function", "gelu" if value == "silu" else "silu"


# ── the score ───────────────────────────────────────────────────────────────────────────────────────────────────────


def pairs() -> list[KeptPair]:
    """Every kind of match that the pipeline makes of these models."""
    kept: dict[tuple[str, str], KeptPair] = {}
    real = MatchTrials.check
    current = [""]

    def check(self: MatchTrials, record: Any) -> Any:
        old, new = self.sides.pieces(record)
        kind = numeric_check.kind_of(old, new)
        if kind not in self.known:
            kept.setdefault((current[0], kind), KeptPair(record.pattern, old, new, self.most, self.not_kept))
            self.known[kind] = numeric_check.NumericCheck(0.0, 0.0, "not tried")
        return self.known[kind]

    MatchTrials.check = check  # pyrefly: ignore
    try:
        for name, gpu in MODELS.items():
            model = load_model(
                f"tiny-{name.removesuffix('-gpu')}", dtype="bfloat16" if gpu else "float32",
                device="meta" if gpu else "cpu",
            )  # fmt: skip
            config = load_config({**(on_meta() if gpu else {}), "verify": "matches"})
            context = Context(route="decoder", backend="eager", context_length=model.context)

            def progress(transform: str, _: int, __: int, name: str = name) -> None:
                current[0] = f"{transform} of {name}"

            run_pipeline(graph_of(model.module), config, context, progress=progress)
    finally:
        MatchTrials.check = real
    return [replace(pair, transform=where) for (where, _), pair in kept.items()]


def variants(pair: KeptPair) -> Iterator[tuple[str, Subprogram]]:
    """One call of the replacement is wrong."""
    for node in pair.new.program:
        call = pair.new.calls[node]
        if pair.new.boundary(node) is not None or call.op != "call_function" or node in pair.old.calls:
            continue
        found = node.meta.get("val")
        value = found[0] if isinstance(found, (list, tuple)) and found else found
        faults: list[tuple[str, RecordedCall]] = []
        if isinstance(value, Tensor) and value.is_floating_point() and not str(call.target).startswith("<built-in"):
            faults += [(name, faulty_result(call, fault)) for name, fault in RESULTS.items()]
            faults.append(("stale", faulty_result(call, Stale())))
        faults += faulty_arguments(call)
        for name, wrong in faults:
            calls = {**pair.new.calls, node: wrong}
            yield f"{name}: %{node.name} in {pair.transform}", replace(pair.new, calls=calls)


def caught(pair: KeptPair, wrong: Subprogram) -> str:
    """How it was noticed; '' where it was not."""
    try:
        PairTrials(pair.old, wrong, "%planted", pair.most).all(pair.not_kept)
    except NumericCheckError:
        return "refused"
    except (RuntimeError, ValueError, TypeError, LookupError) as error:
        return f"does not run: {type(error).__name__}"
    return ""


def score(limit: int | None = None) -> tuple[Counter[str], list[str]]:
    """How many variants there are by what became of them, and the survivors that no reason covers. limit: of each
    pair, so many spread over all of its variants."""
    counts: Counter[str] = Counter()
    survivors = []
    for pair in pairs():
        planted = list(variants(pair))
        step = max(len(planted) // limit, 1) if limit else 1
        for name, wrong in planted[::step]:
            found = caught(pair, wrong)
            reason = next((why for pattern, why in REASONS.items() if re.match(pattern, name)), "")
            counts["caught" if found else "with a reason" if reason else "survived"] += 1
            if not found and not reason:
                survivors.append(name)
    return counts, survivors


def main(*options: str) -> int:
    counts, survivors = score(int(options[0]) if options else None)
    print(dict(counts), *survivors, sep="\n")
    return len(survivors)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
