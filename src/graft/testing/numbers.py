"""Eager against compiled, over dtypes and devices. A device that is not there is a skip with the reason.

@matrix(dtypes=("float32", "bfloat16"), devices=("cpu", "cuda"))
def test_numbers(dtype, device):
    assert_matches_eager(Model(), (x,), "fuse_swiglu", dtype=dtype, device=device, roundings=2, wrong=Other())
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from graft.ir.nodes import leaves
from graft.ops.cases import UNIT
from graft.testing.failure import failure
from graft.testing.fusion import Config, Tried, as_module, name_of, settings_for

DTYPES = ("float32", "bfloat16", "float16")
DEVICES = ("cpu", "cuda")
SIZES = {None: "auto", True: "dynamic", False: "static"}


def device_problem(device: str) -> str | None:
    """Why nothing can run on `device` here, or None."""
    kind, _, number = device.partition(":")
    if kind == "cpu":
        return None
    if kind != "cuda":
        return f"this kit knows cpu and cuda, not {device!r}"
    if not torch.cuda.is_available():
        return "torch sees no GPU on this machine"
    if number and int(number) >= torch.cuda.device_count():
        return f"there is no {device}: torch sees {torch.cuda.device_count()} GPUs"
    return None


def matrix(
    dtypes: Sequence[str] = DTYPES, devices: Sequence[str] = DEVICES, dynamics: Sequence[bool | None] = ()
) -> Any:
    """A decorator: the test runs with every `dtype` (a torch.dtype) and `device` (a name); with `dynamics`, also with
    every `dynamic`, as torch.compile takes it."""
    import pytest

    cases = []
    for device in devices:
        problem = device_problem(device)
        marks = [pytest.mark.skip(reason=problem)] if problem else []
        for dtype in dtypes:
            given, name = (getattr(torch, dtype), device), f"{dtype}-{device}"
            cases += [pytest.param(*given, d, marks=marks, id=f"{name}-{SIZES[d]}") for d in dynamics]
            cases += [] if dynamics else [pytest.param(*given, marks=marks, id=name)]
    return pytest.mark.parametrize(("dtype", "device", *(("dynamic",) if dynamics else ())), cases)


def moved(values: Any, dtype: torch.dtype, device: str) -> Any:
    """Tensors on `device`, floating ones in `dtype`."""

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device=device, dtype=dtype if value.is_floating_point() else None)

    return pytree.tree_map(move, values)


def bound_of(dtype: torch.dtype, roundings: float) -> float:
    """Relative and absolute: so many roundings of the dtype. 0: the same bits."""
    return 2 * roundings * UNIT[dtype] if dtype in UNIT else 0.0


def distance(got: Tensor, wanted: Tensor, bound: float) -> tuple[float, str]:
    """The largest error in parts of what is allowed, and where it is; infinite where there is anything else wrong."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return float("inf"), f"{got.dtype} {list(got.shape)}, not {wanted.dtype} {list(wanted.shape)}"
    left, right = got.detach().cpu().double(), wanted.detach().cpu().double()
    error = (left - right).abs()
    same = (left == right) | (left.isnan() & right.isnan())
    error = torch.where(same, torch.zeros_like(error), error.nan_to_num(float("inf"), float("inf")))
    share = torch.where(same, error, error / (bound * (1 + right.abs().nan_to_num(0.0))))  # error / 0 is infinite
    if not share.numel():
        return 0.0, ""
    worst = int(share.argmax())
    position = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), share.shape))
    return float(
        share.flatten()[worst]
    ), f"{left.flatten()[worst]:.9g} instead of {right.flatten()[worst]:.9g} at {position}"


def compare(got: Any, wanted: Any, roundings: float) -> tuple[float, str]:
    pairs = list(leaves(pytree.tree_leaves(got))), list(leaves(pytree.tree_leaves(wanted)))
    if len(pairs[0]) != len(pairs[1]):
        return float("inf"), f"{len(pairs[0])} results, not {len(pairs[1])}"
    worst = (0.0, "")
    for left, right in zip(*pairs, strict=True):
        if isinstance(left, Tensor) and isinstance(right, Tensor):
            found = distance(left, right, bound_of(right.dtype, roundings))
        else:
            found = (0.0, "") if left == right else (float("inf"), f"{left!r} instead of {right!r}")
        worst = max(worst, found)
    return worst


def assert_same_numbers(got: Any, wanted: Any, *, roundings: float = 0, wrong: Any = None) -> None:
    """Results equal to so many roundings of their dtype (0: bit for bit).

    wrong: results of a variant that is a little wrong; the same comparison must reject them, or it shows nothing.
    """
    __tracebackhide__ = True
    within = f"within {roundings:g} roundings of the dtype" if roundings else "bit for bit"
    share, text = compare(got, wanted, roundings)
    if share > 1 or (not roundings and share > 0):
        part = f" ({share:.3g} times what is allowed)" if 0 < share < float("inf") else ""
        raise failure(
            f"the same numbers {within}",
            f"{text}{part}",
            advice="correct the replacement; if it rounds elsewhere by design, say so (exact=False), allow it here",
        )
    if wrong is not None and compare(wrong, wanted, roundings)[0] <= 1:
        raise failure(
            f"the wrong variant is rejected {within}",
            "it passes, so this comparison would let a defect through",
            advice="allow fewer roundings, use larger or more inputs, or make the variant more wrong",
        )


def assert_matches_eager(
    module: Tried,
    args: tuple[Any, ...],
    transform: str | Sequence[str],
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    roundings: float = 0,
    wrong: Tried | None = None,
    config: Config = None,
    backend: str = "eager",
) -> Callable[..., Any]:
    """The module compiled with `transform` (one or several) gives what it gives in eager, in `dtype` on `device`.

    wrong: a module or function of the same inputs that is a little wrong, which the comparison must reject.
    """
    __tracebackhide__ = True
    from graft.api.compile import compile as graft_compile

    names = [transform] if isinstance(transform, str) else list(transform)
    settings = settings_for(names[0], names[1:], config, "structure")
    given = moved(args, dtype, device)
    local = placed(module, dtype, device)
    with torch.no_grad():
        wanted = local(*given)
        other = None if wrong is None else placed(wrong, dtype, device)(*given)
    compiled = graft_compile(local, given, config=settings, backend=backend)
    idle = [name for name in names if not compiled.report.transforms[name].matches]
    if idle:
        raise failure(
            f"{' and '.join(names)} fuse {name_of(module)} in {dtype} on {device}",
            f"{idle[0]} did not match",
            [compiled.report.transforms[idle[0]].reason],
            advice="see assert_fuses; numbers without a fusion show nothing",
        )
    assert_same_numbers(compiled(*given), wanted, roundings=roundings, wrong=other)
    return compiled


def placed(module: Tried, dtype: torch.dtype, device: str) -> nn.Module:
    """A copy of the module in `dtype` on `device`."""
    return copy.deepcopy(as_module(module)).to(device=device, dtype=dtype)
