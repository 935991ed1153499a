"""What an operator is: a schema, a shape rule, a reference in plain torch, and one ordered table of kernels.

A call takes the first kernel of the table that has no problem with it. A kernel asked for by name runs or raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch

from graft.base.errors import KernelUnavailable, UsageError, near
from graft.base.plugins import watch
from graft.ops.call import Call, call_class

LIBRARY = torch.library.Library("graft", "FRAGMENT")
OPS: dict[str, OpSpec] = {}
watch(OPS)
Problem = Callable[[Call], str | None]


@dataclass(frozen=True, eq=False)
class Kernel:
    """One way to run an op.

    problem: why it cannot run such calls, or None; it reads what all calls of one site in a graph have in common,
    such as dtypes and devices. varies: the same for what each call tells anew: sizes, layouts, values.
    """

    name: str
    kind: Literal["existing", "triton", "native", "reference"]
    problem: Problem
    run: Callable[..., Any]
    varies: Problem | None = None


class Pick(NamedTuple):
    """A kernel by measurement, and the sizes that it was measured with, which its `run` takes as `how`."""

    kernel: str
    how: Any = None


@dataclass(frozen=True, eq=False)
class OpSpec:
    """measured: the kernels that were fastest for the sizes of a call, best first; they go before the others."""

    name: str
    schema: str
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    kernels: tuple[Kernel, ...] = ()
    measured: Callable[[Call], Iterable[Pick]] | None = None

    @cached_property
    def table(self) -> tuple[Kernel, ...]:
        """The kernels in order. The last takes every call."""
        return (*self.kernels, Kernel("reference", "reference", takes_all, self.reference))

    @cached_property
    def by_name(self) -> dict[str, Kernel]:
        return {kernel.name: kernel for kernel in self.table}

    @cached_property
    def call(self) -> type[Call]:
        """Of the op's arguments, in order."""
        return call_class(self.name, getattr(torch.ops.graft, self.name).default._schema.arguments)

    def kernel(self, name: str) -> Kernel:
        if name not in self.by_name:
            raise UsageError(f"graft::{self.name} has no kernel {name!r}{near(name, self.by_name)}")
        return self.by_name[name]


def takes_all(call: Call) -> str | None:  # noqa: ARG001
    return None


def native(problem: Problem = takes_all) -> Kernel:
    """C++ for a CPU (native.h), which backend="native" compiles into its step; `problem`: of such a step's calls."""

    def asked(call: Call) -> str | None:
        if call.asker.backend != "native":
            return "it runs in the compiled step of backend='native'"
        return problem(call) or call.asker.problem()

    return Kernel("native", "native", asked, in_a_step)


def in_a_step(*_: object) -> Any:
    raise KernelUnavailable("a native kernel runs in the compiled step of backend='native', not by itself")


def define(spec: OpSpec) -> OpSpec:
    """Registers the op with torch; calls go to the kernel that `choose` gives.

    Results are contiguous, as `fake` says: Inductor plans with the recorded strides, and references keep those of
    their inputs.
    """
    from graft.ops.selection import choose

    if spec.name in OPS:
        raise UsageError(f"an op graft::{spec.name} is there already, of {OPS[spec.name].reference.__module__}")

    def dispatch(*args: Any) -> Any:
        result = choose(spec, make(*args)).run(*args)
        if isinstance(result, torch.Tensor):
            return result.contiguous()
        return type(result)(tensor.contiguous() for tensor in result)

    LIBRARY.define(f"{spec.name}{spec.schema}")
    LIBRARY.impl(spec.name, dispatch, "CompositeExplicitAutograd")
    torch.library.register_fake(f"graft::{spec.name}", spec.fake, lib=LIBRARY)
    make = spec.call
    OPS[spec.name] = spec
    return spec


def vector_problem(size: int, *vectors: torch.Tensor | None) -> str | None:
    """Why kernels, which read `size` values side by side of a weight or bias, cannot take one of these, or None."""
    for vector in vectors:
        if vector is not None and (vector.dim() != 1 or vector.shape[0] != size or vector.stride(0) != 1):
            shape, steps = list(vector.shape), list(vector.stride())
            return f"a weight or bias is {shape} in steps of {steps}, not {size} in a row"
    return None


def needs_triton(*tensors: torch.Tensor | None) -> str | None:
    """None when Triton can run on these tensors, else why not."""
    for tensor in tensors:
        if tensor is not None and tensor.device.type != "cuda":
            return f"Triton kernels run on a GPU, the tensors are on {tensor.device}"
    return None
