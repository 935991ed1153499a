"""Which kernel of an op's table runs a call: decided here, for every backend.

    named in the config  ─▶ that one, or KernelUnavailable with its reason
    asked by native      ─▶ the native kernel first
    measured             ─▶ the kernels that were fastest for the call's sizes, best first
    else                 ─▶ the table, in order: existing kernels, ours, the reference

`choose` is asked at every call of `torch.ops.graft`. A graph's calls are bound once, by `bind`: what all calls of a
site have in common is asked then, and only what varies from call to call is asked again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from graft.base.errors import KernelUnavailable
from graft.ops.call import EAGER, Call
from graft.ops.ran import Ran, Skipped, reasons_text

if TYPE_CHECKING:
    from graft.ops.spec import Kernel, OpSpec


class Chosen(NamedTuple):
    """A kernel, the sizes that it was measured with, and why those before it do not run."""

    kernel: Kernel
    how: Any
    skipped: Skipped

    @property
    def name(self) -> str:
        return self.kernel.name

    def run(self, *args: Any) -> Any:
        return self.kernel.run(*args) if self.how is None else self.kernel.run(*args, how=self.how)


def choose(spec: OpSpec, call: Call, named: str | None = None, among: tuple[Kernel, ...] | None = None) -> Chosen:
    """The kernel for a call. among: those that take all calls of a site, but for what varies; without: all."""
    if named is not None:
        return Chosen(checked(spec, call, named), None, ())
    skipped: list[tuple[str, str]] = []
    for kernel, how in candidates(spec, call, among or spec.table):
        problem = kernel.problem(call) if among is None else None
        if problem is None and kernel.varies is not None:
            problem = kernel.varies(call)
        if problem is None:
            return Chosen(kernel, how, tuple(skipped))
        skipped.append((kernel.name, problem))
    raise KernelUnavailable(f"no kernel of graft::{spec.name} takes this call: {reasons_text(skipped)}")


def candidates(spec: OpSpec, call: Call, table: tuple[Kernel, ...]) -> Iterable[tuple[Kernel, Any]]:
    """With the sizes that each is to have, in order."""
    if spec.measured is None and call.asker is EAGER:
        return zip(table, repeat(None), strict=False)
    return preferred(spec, call, table)


def preferred(spec: OpSpec, call: Call, table: tuple[Kernel, ...]) -> Iterator[tuple[Kernel, Any]]:
    """Native ones first where that backend asks, then by measurement, then those that were not tried."""
    tried: list[Kernel] = []
    if is_native(call):
        tried = [kernel for kernel in table if kernel.kind == "native"]
        yield from zip(tried, repeat(None), strict=False)
    if spec.measured is not None:
        for name, how in spec.measured(call):
            kernel = spec.by_name[name]
            if kernel in table and kernel not in tried:
                tried.append(kernel)
                yield kernel, how
    yield from ((kernel, None) for kernel in table if kernel not in tried)


def checked(spec: OpSpec, call: Call, named: str) -> Kernel:
    """The kernel of that name, or KernelUnavailable."""
    kernel = spec.kernel(named)
    problem = problem_of(kernel, call)
    if problem is not None:
        raise unavailable(spec, kernel, problem)
    return kernel


def problem_of(kernel: Kernel, call: Call) -> str | None:
    """Why a kernel cannot run one call, or None."""
    problem = kernel.problem(call)
    return kernel.varies(call) if problem is None and kernel.varies is not None else problem


def unavailable(spec: OpSpec, kernel: Kernel, problem: str) -> KernelUnavailable:
    return KernelUnavailable(f"kernel {kernel.name!r} of graft::{spec.name} cannot run this call: {problem}")


class Bound(NamedTuple):
    """What a node of a graph calls, and what the report says of it."""

    run: Callable[..., Any]
    ran: Ran


def bind(spec: OpSpec, call: Call, named: str | None = None) -> Bound:
    """call: of the site's recorded tensors, whose sizes may be symbols."""
    if named is not None:
        kernel = spec.kernel(named)
        problem = kernel.problem(call)
        if problem is not None:
            raise unavailable(spec, kernel, problem)
        return Bound(named_run(spec, kernel), Ran((named,), kernel.kind, note="named in the config"))
    left: list[Kernel] = []
    skipped: list[tuple[str, str]] = []
    for kernel in sorted(spec.table, key=lambda kernel: kernel.kind != "native") if is_native(call) else spec.table:
        problem = kernel.problem(call)
        if problem is not None:
            skipped.append((kernel.name, problem))
            continue
        left.append(kernel)
        if kernel.kind == "native" or (kernel.varies is None and spec.measured is None):
            break  # it takes all calls, and none behind it may have been measured to be faster
    if len(left) == 1:
        return Bound(left[0].run, Ran((left[0].name,), left[0].kind, tuple(skipped)))
    note = "" if spec.measured is None else "as measured"
    return Bound(by_call(spec, tuple(left)), Ran(tuple(kernel.name for kernel in left), "", tuple(skipped), note))


def is_native(call: Call) -> bool:
    return call.asker.backend == "native"


@cache
def by_call(spec: OpSpec, among: tuple[Kernel, ...]) -> Callable[..., Any]:
    """The op as a function that chooses among these at every call."""
    make = spec.call

    def run_chosen(*args: Any) -> Any:
        return choose(spec, make(*args), among=among).run(*args)

    return run_chosen


@cache
def named_run(spec: OpSpec, kernel: Kernel) -> Callable[..., Any]:
    """The kernel, which raises for calls that it does not take."""
    varies, make = kernel.varies, spec.call
    if varies is None:
        return kernel.run

    def run_named(*args: Any) -> Any:
        problem = varies(make(*args))
        if problem is not None:
            raise unavailable(spec, kernel, problem)
        return kernel.run(*args)

    return run_named
