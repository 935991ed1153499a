"""Does an op do what its schema says? One call on given arguments, with snapshots around it.

A write that is not declared, a result that lies in an input's memory, a second run that gives something else, on a
GPU a wait for the device, and what torch.library.opcheck finds (a fake implementation with other shapes).

assert_op_safe(torch.ops.mine.soft_cap.default, (x, 30.0))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx.node import map_aggregate

from graft.ir.nodes import OpOverload
from graft.passes.numeric.execution import on_cpu, tensors
from graft.passes.numeric.inputs import copied, same
from graft.testing.failure import failure

OPCHECKS = ("test_schema", "test_faketensor")
EVERY_OPCHECK = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def assert_op_safe(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    opchecks: Sequence[str] = EVERY_OPCHECK,
) -> None:
    """The op keeps to its schema on these arguments, which are copied for every run. opchecks: of torch's own."""
    __tracebackhide__ = True
    found = list(call_problems(op, tuple(args), dict(kwargs or {}), opchecks))
    if found:
        raise failure(
            f"{op} does what its schema says",
            f"it {found[0]}",
            [f"and it {problem}" for problem in found[1:]],
            advice="declare it in the schema (mutates_args, an alias, a tag), or copy before writing or returning",
        )


def call_problems(
    op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], opchecks: Sequence[str] = OPCHECKS
) -> Iterator[str]:
    """What is wrong, as the rest of a sentence that begins with the op's name."""

    def given() -> tuple[Any, Any]:
        return map_aggregate(args, copied), map_aggregate(dict(kwargs), copied)

    with torch.no_grad():
        handed = given()
        first = on_cpu(op, *handed)
        for name in undeclared_writes(op, (args, kwargs), handed):
            yield f"writes into its argument {name} and does not declare it in mutates_args"
        if not any(result.alias_info for result in op._schema.returns) and shares_memory(first, handed):
            yield "returns memory of an input and does not declare it; return a copy"
        kept = map_aggregate(first, copied)  # a stale buffer would be written over by the second run
        second = on_cpu(op, *given())
        if torch.Tag.nondeterministic_seeded not in op.tags and not same(tensors(kept), tensors(second)):
            yield "gives another result in a second run on the same inputs; an op that samples has a tag for that"
        yield from waits(op, *given())
    if opchecks:
        try:
            torch.library.opcheck(op, *given(), test_utils=tuple(opchecks))
        except Exception as error:  # noqa: BLE001  whatever torch raises is its finding
            lines = [line for line in str(error).splitlines() if line.strip()]
            yield f"fails torch.library.opcheck: {lines[0] if lines else type(error).__name__}"


def undeclared_writes(op: OpOverload, before: tuple[Any, Any], after: tuple[Any, Any]) -> Iterator[str]:
    for index, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            continue
        pair = [args[index] if index < len(args) else kwargs.get(argument.name) for args, kwargs in (before, after)]
        if not same(*(tensors(value) for value in pair)):
            yield argument.name


def shares_memory(results: Any, handed: tuple[Any, Any]) -> bool:
    args, kwargs = handed
    memory = {t.untyped_storage().data_ptr() for t in tensors([*args, *kwargs.values()]) if t.numel()}
    return any(t.untyped_storage().data_ptr() in memory for t in tensors(results) if t.numel())


def waits(op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[str]:
    """On a GPU: a call that waits for the device stops the host in every step."""
    if not any(t.is_cuda for t in tensors([*args, *kwargs.values()])):
        return
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        op(*args, **kwargs)
    except RuntimeError as error:
        yield f"waits for the device: {str(error).splitlines()[0]}"
    finally:
        torch.cuda.set_sync_debug_mode(mode)
