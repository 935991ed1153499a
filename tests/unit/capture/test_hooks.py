"""Forward hooks of the module that is compiled are part of it: what they see, change and assign."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import graft
from graft.base.errors import CaptureError


@dataclass
class Batch:
    x: torch.Tensor


class Plus(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, batch: Any, *, k: Any = None) -> Any:
        x = batch.x if isinstance(batch, Batch) else batch
        y = x + 1 if k is None else x + k
        return Batch(y) if isinstance(batch, Batch) else y


def before(hook: Callable[..., Any], **options: bool) -> Callable[[nn.Module], Any]:
    return lambda module: module.register_forward_pre_hook(hook, **options)


def after(hook: Callable[..., Any], **options: bool) -> Callable[[nn.Module], Any]:
    return lambda module: module.register_forward_hook(hook, **options)


def count(module: Any, _: Any) -> None:
    module.calls = module.calls + 1


def doubled(_: Any, args: Any, kwargs: Any) -> Any:
    return (args[0] * 2,), {"k": kwargs["k"] * 3}


X, K = torch.tensor([1.0, 2.0]), {"k": torch.tensor(5.0)}
CASES = {
    "a new input": (before(lambda _, args: args[0] * 2), X, {}),
    "new keywords": (before(doubled, with_kwargs=True), X, K),
    "a new result": (after(lambda _, __, y: y + 100), X, {}),
    "keywords of a result": (after(lambda _, __, k, y: y * k["k"], with_kwargs=True), X, K),
    "objects": (before(lambda _, args: (Batch(args[0].x * 2),)), Batch(X), {}),
    "an object": (after(lambda _, __, y: Batch(y.x * 3)), Batch(X), {}),
    "a buffer": (before(count), X, {}),
}


def tensors(value: Any) -> torch.Tensor:
    return value.x if isinstance(value, Batch) else value


@pytest.mark.parametrize("name", CASES)
def test_hooks_of_the_module_itself_are_part_of_it(name):
    register, x, kwargs = CASES[name]
    module, eager = Plus(), Plus()
    register(module)
    register(eager)
    compiled = graft.compile(module, (x,), kwargs, backend="eager")
    assert bool(module._forward_pre_hooks) + bool(module._forward_hooks) == 1 and "forward" not in vars(module)
    assert not torch.equal(tensors(eager(x, **kwargs)), tensors(Plus()(x, **kwargs))) or eager.calls == 1
    result = compiled(x, **kwargs)
    assert type(result) is type(x) and torch.equal(tensors(result), tensors(eager(x, **kwargs)))
    compiled(x, **kwargs)
    assert module.calls == eager.calls == (2 if name == "a buffer" else 0)


def test_a_hook_for_all_modules_may_look_but_not_change():
    seen: list[str] = []
    look = nn.modules.module.register_module_forward_hook(lambda module, _, __: seen.append(type(module).__name__))
    try:
        assert torch.equal(graft.compile(Plus(), (X,), backend="eager")(X), X + 1) and "Plus" in seen
    finally:
        look.remove()
    change = nn.modules.module.register_module_forward_hook(lambda _, __, y: y * 2)
    try:
        with pytest.raises(CaptureError, match=r"registered for all modules, changes what they take or give"):
            graft.compile(Plus(), (X,), backend="eager")
        assert torch.equal(Plus()(X), (X + 1) * 2)
    finally:
        change.remove()
