"""Functions that torch compiles ahead of time and saves: torch's side of it (`torch.compile(…).aot_compile`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable, SerializableCallable
from torch._dynamo.guards import CheckFunctionManager
from torch._functorch import config as functorch_config

AHEAD = {"enable_aot_compile": True}  # torch 2.11 asks for it
Compiled = Callable[..., Any]


def compiles_ahead() -> bool:
    """Whether torch compiles the graph at hand to save it."""
    return bool(functorch_config.bundled_autograd_cache)


def compile_ahead(module: nn.Module, args: tuple[Any, ...], **settings: Any) -> Any:
    """torch's compiled function, which is called with the module first and can be saved."""
    with dynamo_config.patch(AHEAD):
        compiled: Any = torch.compile(module, fullgraph=True, backend="graft", **settings)
        return compiled.forward.aot_compile((args, {}))


def saved_by_torch(kind: type[Any]) -> type[Any]:
    """Class decorator: torch saves functions that hold such an object, by its two class methods."""
    SerializableCallable.register(kind)
    return kind


def can_be_saved(compiled: Compiled) -> bool:
    return getattr(compiled, "serialize", None) is not None


def guard_can_be_saved(entry: Any) -> bool:
    """Of what torch's guard filters are given."""
    unsupported = CheckFunctionManager.UNSUPPORTED_SERIALIZATION_GUARD_TYPES
    return entry.guard_type not in unsupported and not any(k in unsupported for k in entry.derived_guard_types)


def to_bytes(compiled: Compiled) -> bytes:
    """What Inductor compiled, in torch's own format, which is a pickle."""
    kind = BundledAOTAutogradSerializableCallable
    return kind.serialize_compile_artifacts(kind(compiled))


def from_bytes(data: bytes) -> Compiled:
    return BundledAOTAutogradSerializableCallable.deserialize_compile_artifacts(data)
