"""What a story is about: a model, a function in a file with its calls, or a folder that holds a story already."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graft.base.authors import told
from graft.base.errors import GraftError, UsageError, near
from graft.base.files import Progress
from graft.base.plugins import import_file
from graft.capture.decoder import Decoder
from graft.models.load import load_model


@dataclass(frozen=True)
class StageTarget:
    name: str
    function: Callable[..., Any]
    calls: tuple[tuple[Any, ...], ...]


def find_target(name: str, tokens: Sequence[int] = (8,), progress: Progress | None = None, *, dtype: str = "auto",
                device: str = "auto") -> StageTarget:  # fmt: skip
    """`FILE.py:function`, or the name of a model. tokens: how many each call of a model has."""
    path, colon, function = name.rpartition(":")
    if colon and path.endswith(".py"):
        return function_target(path, function)
    if name.endswith(".py"):
        raise UsageError(f"{name}: name the function, too: {name}:FUNCTION")
    loaded = load_model(name, dtype=dtype, device=device, progress=progress)
    where = next(loaded.module.parameters()).device
    calls = []
    for count in tokens:
        ids = torch.arange(count, device=where).remainder(loaded.module.config.vocab_size)[None]
        calls.append((ids, torch.arange(count, device=where)[None]))
    return StageTarget(loaded.name, Decoder(loaded.module), tuple(calls))


def function_target(path: str, name: str, sizes: Sequence[int] = ()) -> StageTarget:
    """A function, a module, or a class of modules. Its calls: `NAME_inputs` or `inputs` beside it, which with `sizes`
    is called with each of them."""
    with in_file(path):
        file = import_file(path)
    found = getattr(file, name, None)
    if found is not None and not callable(found):
        raise UsageError(f"{path}: {name} is of type {type(found).__name__}, which cannot be called")
    if found is None:
        known = [key for key, value in vars(file).items() if callable(value) and not key.startswith("_")]
        raise UsageError(f"{path} has no function {name!r}{near(name, known)}")
    with in_file(path):
        if isinstance(found, type) and issubclass(found, nn.Module):
            found = found()
        given = getattr(file, f"{name}_inputs", None) or getattr(file, "inputs", None)
        calls = sized_calls(path, name, given, sizes) if sizes else given() if callable(given) else given
    return StageTarget(f"{Path(path).name}:{name}", found, checked_calls(path, name, found, calls))


def sized_calls(path: str, name: str, given: Any, sizes: Sequence[int]) -> list[Any]:
    """The first call for each size."""
    if not callable(given) or not inspect.signature(given).parameters:
        raise UsageError(f"{path}: a size is asked for; write def {name}_inputs(size): return [(argument, …)]")
    found = [given(size) for size in sizes]
    return [one[0] if isinstance(one, list) and one else one for one in found]


def bucket_target(
    name: str, sizes: Sequence[int], progress: Progress | None = None, *, dtype: str = "auto", device: str = "auto"
) -> StageTarget:
    """One call for each size: as many tokens of a model, or what `FUNCTION_inputs(size)` returns."""
    path, colon, function = name.rpartition(":")
    if colon and path.endswith(".py"):
        return function_target(path, function, sizes)
    return find_target(name, sizes, progress, dtype=dtype, device=device)


@contextmanager
def in_file(path: str) -> Iterator[None]:
    """Errors of the user's file in one line."""
    try:
        yield
    except GraftError:
        raise
    except (Exception, SystemExit) as error:  # whatever the file raises
        raise UsageError(f"{path} cannot be used: {told(error)}") from error


def checked_calls(path: str, name: str, function: Callable[..., Any], calls: Any) -> tuple[tuple[Any, ...], ...]:
    advice = f"write def {name}_inputs(): return [(argument, …), …], a tuple for each call"
    if calls is None:
        called = function.forward if isinstance(function, nn.Module) else function
        parameters = inspect.signature(called).parameters.values()
        needed = [
            p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        if needed:
            raise UsageError(
                f"{path}: {name} takes {', '.join(needed)}, and nothing says what to call it with; {advice}"
            )
        return ((),)
    listed = [calls] if isinstance(calls, tuple) else calls
    if not isinstance(listed, list) or not listed or not all(isinstance(call, tuple) for call in listed):
        raise UsageError(f"{path}: the inputs of {name} are {type(calls).__name__}, not a list of tuples; {advice}")
    for number, call in enumerate(listed, 1):
        if problem := misfit(function, call):
            raise UsageError(f"{path}: call {number} of {name}_inputs does not fit {name}: {problem}; {advice}")
    return tuple(listed)


def misfit(function: Callable[..., Any], call: tuple[Any, ...]) -> str:
    """Why the arguments are not those that the function takes; empty where they are, or that cannot be known."""
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except ValueError:  # written in C
        return ""
    try:
        signature.bind(*call)
    except TypeError as error:
        return f"{error} of {signature}"
    return ""
