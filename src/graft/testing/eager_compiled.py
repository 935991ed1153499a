"""torch.compile against eager: results, strides, aliases, writes to arguments, and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graft.backends.inductor import compiled_graphs, reset_compiler, trust_instruction_sets
from graft.ir.storage import storage_id
from graft.testing.failure import failure
from graft.testing.fusion import Tried, as_module, name_of
from graft.testing.numbers import assert_same_numbers, moved, placed


def assert_compiled_like_eager(
    function: Tried,
    args: tuple[Any, ...],
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    dynamic: bool | None = None,
    gradients: bool = False,
    roundings: float = 4,
    wrong: Tried | None = None,
    backend: Any = "inductor",
) -> None:
    """The function compiled by torch.compile does what it does in eager, in `dtype` on `device`.

    Compared are the numbers of results, and of arguments and buffers afterwards, to so many roundings of the dtype;
    results that are no tensors; strides of results; which results and arguments share memory; with `gradients`, those
    of all floating arguments and parameters. wrong: a function that is a little wrong, whose results the same
    comparison must reject.
    """
    __tracebackhide__ = True
    trust_instruction_sets()
    eager = run(placed(function, dtype, device), moved(args, dtype, device), gradients)
    other = None if wrong is None else run(placed(wrong, dtype, device), moved(args, dtype, device), gradients)
    reset_compiler()
    try:
        module = placed(function, dtype, device)
        compiled = torch.compile(as_module(module), backend=backend, dynamic=dynamic)
        before = compiled_graphs()
        got = run(compiled, moved(args, dtype, device), gradients, module)
        if compiled_graphs() == before:
            raise failure(
                f"{name_of(function)} is compiled",
                "Dynamo made no graph of it, and eager is like eager",
                advice="graft stages ask breaks says why",
            )
    finally:
        reset_compiler()
    for what, left, right in (
        ("strides", got[1], eager[1]), ("shared memory", got[2], eager[2]), ("other results", got[3], eager[3]),
    ):  # fmt: skip
        if left != right:
            raise failure(
                f"{what} of {name_of(function)} as in eager: {right}",
                f"{left}",
                advice="what reads the result may depend on it; return a copy, or make the layout explicit",
            )
    assert_same_numbers(got[0], eager[0], roundings=roundings, wrong=None if other is None else other[0])


def run(
    function: Callable[..., Any], args: tuple[Any, ...], gradients: bool, module: torch.nn.Module | None = None
) -> tuple[list[Any], list[Any], set[tuple[str, str]], list[str]]:
    """Numbers (results, arguments and buffers afterwards, gradients), strides of results, pairs that share memory,
    and results that are no tensors."""
    given = copy.deepcopy(args)
    tensors = [value for value in pytree.tree_leaves(given) if isinstance(value, Tensor)]
    leaves = [tensor for tensor in tensors if gradients and tensor.is_floating_point()]
    for leaf in leaves:
        leaf.requires_grad_()
    with torch.set_grad_enabled(gradients):
        returned = pytree.tree_leaves(function(*given))
    results = [value for value in returned if isinstance(value, Tensor)]
    after = pytree.tree_leaves(given)  # a list that it was given may hold more now
    tensors += [one for one in after if isinstance(one, Tensor) and not any(one is known for known in tensors)]
    others = [repr(value) for value in (*returned, *after) if not isinstance(value, Tensor)]
    owner = module if module is not None else function
    buffers = list(owner.buffers()) if isinstance(owner, torch.nn.Module) else []
    if isinstance(owner, torch.nn.Module):
        leaves += [p for p in owner.parameters() if gradients and p.requires_grad]
    slopes = gradients_of(results, leaves) if gradients else []
    strides = [meaning_strides(result) for result in results]
    numbers = [one.detach() for one in (*results, *tensors, *buffers)] + slopes
    return numbers, strides, shared_memory(results, tensors), others


def gradients_of(results: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Of a sum in which every element of every result has a weight of its own."""
    parts = [result for result in results if result.requires_grad]
    if not parts or not leaves:
        return []
    weights = [torch.linspace(0.5, 1.5, p.numel(), dtype=p.dtype, device=p.device).reshape(p.shape) for p in parts]
    found = torch.autograd.grad(parts, leaves, weights, allow_unused=True)
    return [torch.zeros_like(leaf) if slope is None else slope for slope, leaf in zip(found, leaves, strict=True)]


def meaning_strides(tensor: Tensor) -> tuple[int, ...]:
    """Of dimensions that are stepped along; the stride of a size of one says nothing."""
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def shared_memory(results: list[Tensor], tensors: list[Tensor]) -> set[tuple[str, str]]:
    named = [(f"result {i}", one) for i, one in enumerate(results)]
    named += [(f"argument {i}", one) for i, one in enumerate(tensors)]
    return {
        (one, two)
        for index, (one, left) in enumerate(named)
        for two, right in named[index + 1 :]
        if left.numel() and right.numel() and storage_id(left) == storage_id(right)
    }
