"""Programs and inputs that torch.export does not take, refused by name before it is tried."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from graft.base.errors import CaptureError, UsageError


def refuse_scripts(module: torch.nn.Module) -> None:
    for path, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            what = f"the module {path} is" if path else "it is"
            raise UsageError(
                f"{what} a {type(part).__name__} of TorchScript, which has no Python code to capture; compile the"
                " module that it was made from"
            )


def refuse_deques(values: Sequence[Any], names: Sequence[str]) -> None:
    """torch takes them apart, and their graph would have inputs that nobody has named."""
    for name, value in zip(names, values, strict=False):
        if isinstance(value, deque):
            raise CaptureError(f"{name} is a deque, which a graph cannot take; pass a list")


def refuse_modules(values: Sequence[Any], names: Sequence[str]) -> None:
    for name, value in zip(names, values, strict=False):
        if isinstance(value, torch.nn.Module):
            raise UsageError(
                f"{name} is a module, whose parameters no graph takes as an input; compile a module that holds it, or"
                " a function that closes over it"
            )


def refuse_nested(module: torch.nn.Module, values: Sequence[Any], names: Sequence[str]) -> None:
    for name, value in (*zip(names, values, strict=False), *module.named_parameters(), *module.named_buffers()):
        if isinstance(value, torch.Tensor) and value.is_nested:
            raise CaptureError(
                f"{name} is a nested tensor, whose rows have sizes of their own, which no graph has; pass its"
                " .values() and .offsets(), or a padded tensor"
            )
