"""What a call leaves behind: results, inputs and state, and how all of them lie in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graft.ir.storage import storage_id


@dataclass(frozen=True)
class Seen:
    """After one call. `sharing`: for each result, the places whose memory it is in, and whether it is that object."""

    structure: str
    results: list[Any]
    left: dict[str, Any]  # inputs and state
    sharing: list[dict[str, bool]]
    layouts: dict[str, tuple[Any, ...]]


def observe(run: Callable[..., Any], args: tuple[Any, ...], owner: Any) -> Seen:
    """Calls `run`; `owner` is the module whose state it may write, if there is one."""
    with torch.no_grad():
        return look(run(*args), args, owner)


def look(result: Any, args: tuple[Any, ...], owner: Any) -> Seen:
    results, spec = pytree.tree_flatten(result)
    places = {f"input {i}": value for i, value in enumerate(pytree.tree_leaves(args))} | state_of(owner)
    tensors = {name: value for name, value in places.items() if isinstance(value, torch.Tensor)}
    made = {f"result {i}": value for i, value in enumerate(results) if isinstance(value, torch.Tensor)}
    return Seen(
        str(spec),
        [kept(value) for value in results],
        {name: kept(value) for name, value in places.items()},
        [sharing(value, number, {**tensors, **made}) for number, value in enumerate(results)],
        {name: layout(value) for name, value in {**tensors, **made}.items()},
    )


def state_of(owner: Any) -> dict[str, torch.Tensor]:
    return dict(owner.state_dict(keep_vars=True)) if isinstance(owner, torch.nn.Module) else {}


def kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def sharing(value: Any, number: int, others: dict[str, torch.Tensor]) -> dict[str, bool]:
    if not isinstance(value, torch.Tensor) or not value.numel():
        return {}
    mine = storage_id(value)
    apart = {name: other for name, other in others.items() if name != f"result {number}"}
    return {name: other is value for name, other in apart.items() if storage_id(other) == mine}


def layout(value: torch.Tensor) -> tuple[Any, ...]:
    """Sizes, and the strides of dims that have more than one place."""
    strides = [s for size, s in zip(value.shape, value.stride(), strict=True) if size > 1]
    return (tuple(value.shape), tuple(strides) if value.numel() else ())


def compare(got: Seen, expected: Seen, *, layouts: bool = True, close: bool = False) -> None:
    """Raises AssertionError for the first difference, in words."""
    assert got.structure == expected.structure, f"results are nested as {got.structure}, not {expected.structure}"
    for name, value, want in [
        *((f"result {i}", a, b) for i, (a, b) in enumerate(zip(got.results, expected.results, strict=True))),
        *((f"{name} afterwards", got.left[name], expected.left[name]) for name in expected.left),
    ]:
        same(name, value, want, close)
    for number, (shared, want) in enumerate(zip(got.sharing, expected.sharing, strict=True)):
        assert shared.keys() == want.keys(), (
            f"result {number} shares memory with {list(shared)}, in eager with {list(want)}"
        )
        assert shared == want, f"result {number} is the same object as another: {shared}, in eager {want}"
    if layouts:
        assert got.layouts == expected.layouts, f"layouts are {got.layouts}, in eager {expected.layouts}"


def same(name: str, value: Any, want: Any, close: bool) -> None:
    if not isinstance(want, torch.Tensor):
        assert type(value) is type(want) and value == want, f"{name} is {value!r}, in eager {want!r}"
        return
    assert isinstance(value, torch.Tensor), f"{name} is {value!r}, in eager a tensor"
    assert (value.shape, value.dtype) == (want.shape, want.dtype), f"{name} is {value}, in eager {want}"
    if close:
        torch.testing.assert_close(value, want, equal_nan=True, msg=lambda text: f"{name}: {text}")
    else:
        assert torch.equal(value.nan_to_num(), want.nan_to_num()), f"{name} is {value}, in eager {want}"
