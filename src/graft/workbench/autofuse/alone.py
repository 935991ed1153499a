"""Calls of a kernel by itself beside its reference in float64, in memory with marks around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from graft.ops.cases import UNIT, tolerance
from graft.workbench.autofuse.cases import KernelCase
from graft.workbench.autofuse.memory import GuardedMemory

SLACK = 8  # times the dtype's tolerance for one sum as long as the row: kernels chain a few
ROUNDINGS = 8  # of 16 bits, by which what the kernel replaces may be off
CPU = torch.device("cpu")
Reference = Callable[..., Any]
Run = Callable[[tuple[Tensor, ...]], Any]


@dataclass
class ComparedCalls:
    """Calls of one kernel. device: where it runs; the reference runs where the inputs of a case are. shown: the
    results that other inputs change, so that comparing them says something."""

    reference: Reference
    device: torch.device = CPU
    calls: int = 0
    count: int = 0  # of results
    shown: set[int] = field(default_factory=set)

    def problem(self, run: Run, case: KernelCase) -> str:
        """What is wrong with one call, '' for nothing. The first of them is made twice."""
        memory = GuardedMemory()
        given = case.tensors if case.far else tuple(memory.placed(one, self.device) for one in case.tensors)
        with memory:
            got = [one.clone() for one in results(run(given))]
            again = results(run(given)) if not self.calls else got
        plain = results(self.reference(*case.tensors))
        found = memory.problem() or changed(given, case.tensors) or self.compared(got, plain, case)
        if not found and not all(
            torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(got, again, strict=True)
        ):
            found = "a second call on the same inputs gives other results"
        self.calls += 1
        return f"{found} ({case.name})" if found else ""

    def applies(self, case: KernelCase) -> bool:
        """Whether the reference takes such inputs; extreme ones: whether it is right there in float32."""
        try:
            plain = results(self.reference(*case.tensors))
        except (RuntimeError, ValueError, IndexError):
            return False
        return not case.extreme or self.holds(plain, case)

    def holds(self, plain: list[Tensor], case: KernelCase) -> bool:
        """With room for other roundings than its own."""
        exact = results(self.reference(*map(widened, case.tensors)))
        return all(
            bool(one.isfinite().all()) and distance(one, right) <= allowance(one, one, right) / 4
            for one, right in zip(plain, exact, strict=True)
        )

    def unseen(self) -> str:
        """What no call could have shown."""
        if not self.calls:
            return "no call was compared"
        hidden = sorted(set(range(self.count)) - self.shown)
        return f"result {hidden[0]} does not depend on its inputs, so nothing was compared" if hidden else ""

    def compared(self, got: list[Tensor], plain: list[Tensor], case: KernelCase) -> str:
        """plain: the reference in the dtypes of the inputs, which says the dtype of results and, in 16 bits, how near
        is near."""
        exact = results(self.reference(*map(widened, case.tensors)))
        shaken = results(self.reference(*(widened(shake(tensor)) for tensor in case.tensors)))
        self.count = len(exact)
        if len(got) != len(exact):
            return f"{len(got)} results where {len(exact)} belong"
        for index, (mine, usual, right, other) in enumerate(zip(got, plain, exact, shaken, strict=True)):
            allowed = allowance(mine, usual, right)
            wrong = one_wrong(mine, usual, right, allowed, odd=case.odd)
            if wrong:
                return f"result {index} {wrong}"
            if not case.odd and distance(other, right) > allowed:
                self.shown.add(index)
        return ""


def one_wrong(mine: Tensor, plain: Tensor, exact: Tensor, allowed: float, *, odd: bool) -> str:
    if mine.shape != exact.shape:
        return f"is of {list(mine.shape)}, and {list(exact.shape)} is right"
    if mine.dtype != plain.dtype:
        return f"is {mine.dtype}, and {plain.dtype} is right"
    if odd and (found := same_odd(mine, exact, plain)):
        return found
    if not odd and not bool(mine.isfinite().all()):
        return "has numbers that are not finite"
    far = distance(mine, exact)
    return "" if far <= allowed else f"is off by {far:.1e} where {allowed:.1e} is allowed"


def changed(given: tuple[Tensor, ...], before: tuple[Tensor, ...]) -> str:
    for index, (after, tensor) in enumerate(zip(given, before, strict=True)):
        if not torch.equal(after.cpu().nan_to_num(), tensor.cpu().nan_to_num()):
            return f"it writes into its input {index}"
    return ""


def allowance(mine: Tensor, plain: Tensor, exact: Tensor) -> float:
    """In 16 bits: a rounding more than what the kernel replaces, which may overflow where the kernel must not."""
    if mine.dtype in (torch.float32, torch.float64):
        return SLACK * tolerance(torch.float32, int(exact.shape[-1]) if exact.dim() else 1)
    return UNIT[mine.dtype] + min(distance(plain, exact), ROUNDINGS * UNIT[mine.dtype])


def same_odd(mine: Tensor, exact: Tensor, plain: Tensor) -> str:
    """'' where the same elements are NaN and infinite as in float64, or as in the dtype that is computed in."""
    for right in (exact.to(mine.dtype), plain):
        pairs = (
            (mine.isnan(), right.isnan()),
            (mine.isposinf(), right.isposinf()),
            (mine.isneginf(), right.isneginf()),
        )
        if all(torch.equal(a, b) for a, b in pairs):
            return ""
    counts = [f"{int(one.isnan().sum())} NaN and {int(one.isinf().sum())} infinite" for one in (mine, exact)]
    return f"has {counts[0]} numbers, and {counts[1]} are right, or others are"


def widened(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def results(value: Any) -> list[Tensor]:
    """To be compared, wherever they were made."""
    return [one.cpu() for one in (value if isinstance(value, (list, tuple)) else [value])]


def shake(tensor: Tensor) -> Tensor:
    """Slightly other inputs: what the comparison must be able to tell."""
    return (tensor.roll(1) if tensor.dim() else tensor) * 1.01


def distance(got: Tensor, wanted: Tensor) -> float:
    """Largest difference of finite numbers, relative to the largest of each row."""
    if got.shape != wanted.shape:
        return float("inf")
    if not wanted.numel():
        return 0.0
    both = got.isfinite() & wanted.isfinite()
    left, right = (torch.where(both, one.double(), 0.0) for one in (got, wanted))
    scale = right.abs().amax(-1, keepdim=True) if right.dim() else right.abs()
    return float(((left - right).abs() / scale.clamp_min(1e-30)).max())
