"""What an operator is: a schema, a shape rule, a reference in plain torch, and an ordered list of kernels.

`auto` takes the first kernel that supports the call. A kernel asked for by name runs or raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch

from graft.errors import KernelUnavailable, UsageError, near

LIBRARY = torch.library.Library("graft", "FRAGMENT")
OPS: dict[str, OpSpec] = {}


@dataclass(frozen=True)
class Kernel:
    """One way to run an op. `supports` gets the call's arguments and answers None, or why it cannot run them."""

    name: str
    kind: Literal["reference", "existing_kernel", "triton"]
    run: Callable[..., Any]
    supports: Callable[..., str | None]


@dataclass(frozen=True)
class OpSpec:
    name: str
    schema: str
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    kernels: tuple[Kernel, ...] = ()
    by_call: bool = False  # which kernel is right depends on sizes that only a call tells, such as the token count

    @property
    def all_kernels(self) -> tuple[Kernel, ...]:
        return (*self.kernels, Kernel("reference", "reference", self.reference, lambda *_: None))


def define(spec: OpSpec) -> OpSpec:
    """Registers the op with torch; calls go to the first kernel that supports them.

    Results are contiguous, as `fake` says: Inductor plans with the recorded strides, and references keep those of
    their inputs.
    """

    def dispatch(*args: Any) -> Any:
        result = choose(spec, *args).run(*args)
        if isinstance(result, torch.Tensor):
            return result.contiguous()
        return type(result)(tensor.contiguous() for tensor in result)

    LIBRARY.define(f"{spec.name}{spec.schema}")
    LIBRARY.impl(spec.name, dispatch, "CompositeExplicitAutograd")
    torch.library.register_fake(f"graft::{spec.name}", spec.fake, lib=LIBRARY)
    OPS[spec.name] = spec
    return spec


def choose(spec: OpSpec, *args: Any, named: str | None = None) -> Kernel:
    """The kernel for a call: the one named, or the first that supports it."""
    if named is not None:
        kernel = next((k for k in spec.all_kernels if k.name == named), None)
        if kernel is None:
            raise UsageError(
                f"graft::{spec.name} has no kernel {named!r}{near(named, [k.name for k in spec.all_kernels])}"
            )
        problem = kernel.supports(*args)
        if problem:
            raise KernelUnavailable(f"kernel {named!r} of graft::{spec.name} cannot run this call: {problem}")
        return kernel
    return next(kernel for kernel in spec.all_kernels if kernel.supports(*args) is None)


@cache
def chooser(name: str) -> Callable[..., Any]:
    """The op as a function that chooses its kernel at every call."""
    spec = OPS[name]

    def run_chosen(*args: Any) -> Any:
        return choose(spec, *args).run(*args)

    return run_chosen


def needs_triton(*tensors: torch.Tensor | None) -> str | None:
    """None when Triton can run on these tensors, else why not."""
    given = [t for t in tensors if t is not None]
    if any(t.device.type != "cuda" for t in given):
        return f"Triton kernels run on a GPU, the tensors are on {given[0].device}"
    return None
