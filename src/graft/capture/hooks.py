"""Forward hooks while a program is traced.

Hooks of the program's own module belong to its forward: what they assign, and the objects that they see, are treated
as those of the forward are. Hooks for all modules are torch's and stay there; they run around compiled modules as
well, so one that changes anything would do so twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from graft.base.errors import CaptureError

GLOBAL_TABLES = ("_global_forward_pre_hooks", "_global_forward_hooks")


@contextmanager
def hooks_inside(module: torch.nn.Module) -> Iterator[None]:
    """Within it, `module.forward` runs the module's own forward hooks, and a call of the module runs none."""
    tables = module._forward_pre_hooks, module._forward_hooks
    if not any(tables):
        yield
        return
    forward, own = module.forward, "forward" in vars(module)
    before, after = (dict(table) for table in tables)
    keywords = set(module._forward_pre_hooks_with_kwargs), set(module._forward_hooks_with_kwargs)

    @functools.wraps(forward)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        for number, hook in before.items():
            if number in keywords[0]:
                args, kwargs = hook(module, args, kwargs) or (args, kwargs)
            elif (found := hook(module, args)) is not None:
                args = found if isinstance(found, tuple) else (found,)
        result = forward(*args, **kwargs)
        for number, hook in after.items():
            found = hook(module, args, kwargs, result) if number in keywords[1] else hook(module, args, result)
            result = result if found is None else found
        return result

    for table in tables:
        table.clear()
    module.forward = hooked  # type: ignore[method-assign]
    try:
        yield
    finally:
        for table, saved in zip(tables, (before, after), strict=True):
            table.update(saved)
        if own:
            module.forward = forward  # type: ignore[method-assign]
        else:
            del module.forward


@contextmanager
def global_hooks_watched() -> Iterator[None]:
    """Within it, a hook for all modules that changes what a module takes or gives raises CaptureError."""
    tables = [getattr(torch.nn.modules.module, name) for name in GLOBAL_TABLES]
    saved = [dict(table) for table in tables]
    for table in tables:
        table.update({number: watched(hook) for number, hook in table.items()})
    try:
        yield
    finally:
        for table, hooks in zip(tables, saved, strict=True):
            table.clear()
            table.update(hooks)


def watched(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook, updated=())
    def observer(*call: Any) -> None:
        if hook(*call) is not None:
            name = getattr(hook, "__qualname__", type(hook).__name__)
            raise CaptureError(
                f"the hook {name}, registered for all modules, changes what they take or give: it would run in the"
                " graph and around the compiled module once more; register it on the modules that it is for"
            )

    return observer
