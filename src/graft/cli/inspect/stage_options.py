"""What the verbs of `graft stages` are given, checked before anything is compiled, and the process that tells it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from graft.base.errors import UsageError, near
from graft.cli.alone import process
from graft.cli.waiting import end_waiting

T = TypeVar("T")
DYNAMIC = {"auto": None, "true": True, "false": False}


def in_own_process(make: Callable[..., T], target: str, kind: type[T]) -> T:
    """`make()`, or `make(keeper)` in another process, where this one is the command's own and no plugin has taken the
    GPU, which a forked process cannot use then."""
    torch = sys.modules.get("torch")
    if not process.alone or (torch is not None and torch.cuda.is_initialized()):
        return make()
    from graft.workbench.stages.apart import tell_apart

    end_waiting()  # its thread is none of the other process
    return tell_apart(make, target, kind)


def read_sizes(text: str) -> list[int]:
    from graft.cli.measure.bench import read_numbers

    sizes = list(dict.fromkeys(read_numbers("buckets", text)))
    if min(sizes) < 1:
        raise UsageError(f"--buckets takes sizes of at least 1, not {text!r}")
    return sizes


def check_mode(mode: str) -> None:
    import torch

    known = [name for name in torch._inductor.list_mode_options() if name != "default"]
    if mode and mode != "default" and mode not in known:
        raise UsageError(f"--mode {mode}: torch.compile has no such mode{near(mode, known)}")


def check_used(target: str, words: Mapping[str, bool]) -> None:
    """words: what was given that such a target has no use for."""
    for name, given in words.items():
        if given:
            raise UsageError(f"{name} does nothing to {target}: leave it out")


def check_function(target: str, words: Mapping[str, bool]) -> None:
    if ".py:" in target:
        check_used("a function, whose inputs say it", words)


def check_dynamic(dynamic: str) -> None:
    if dynamic not in DYNAMIC:
        raise UsageError(f"--dynamic {dynamic}: write auto, true or false")


def index_options(asserts: bool | None) -> list[str]:
    """The options of Inductor by which generated code checks indices."""
    if asserts is None:
        return []
    return [f"assert_indirect_indexing={asserts}", f"debug_index_asserts={asserts}"]


def read_options(given: list[str]) -> dict[str, Any]:
    """`freezing=true` → {"freezing": True}, checked against those that Inductor has."""
    import yaml

    from graft.backends import InductorSettings
    from graft.backends.inductor import inductor_patches

    found = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--option {text}: write KEY=VALUE")
        try:
            found[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UsageError(f"--option {text}: {value!r} is no value of YAML: {error.__class__.__name__}") from error
    inductor_patches(InductorSettings(options=found, fix=False))
    check_types(found)
    return found


def check_types(options: dict[str, Any]) -> None:
    """As torch.compile does, which compiles nothing before it is called."""
    import torch

    for key, value in options.items():
        try:
            torch.compile(check_types, options={key: value})
        except RuntimeError as error:
            raise UsageError(f"--option {key}={value}: {str(error).removeprefix('Unexpected ')}") from error
