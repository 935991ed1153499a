"""Python values that stand in graphs (numbers, texts, dtypes, devices) as JSON and back."""

from __future__ import annotations

from typing import Any

import torch

from graft.base.errors import DumpError

TORCH_NAMES = (("dtype", torch.dtype), ("layout", torch.layout), ("memory_format", torch.memory_format))


def encode_literal(value: Any) -> Any:
    """JSON values stand for themselves; all else is a one-key object that names its kind."""
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return {"float": repr(value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, complex):
        return {"complex": [encode_literal(value.real), encode_literal(value.imag)]}
    for kind, types in TORCH_NAMES:
        if isinstance(value, types):
            return {kind: str(value).removeprefix("torch.")}
    raise DumpError(f"a graph holds the value {value!r} of type {type(value).__name__}, which dumps cannot store")


def decode_literal(entry: Any) -> Any:
    if not isinstance(entry, dict):
        return entry
    (kind, text), *_ = entry.items()
    if kind == "float":
        return float(text)
    if kind == "device":
        return torch.device(text)
    if kind == "complex":
        return complex(decode_literal(text[0]), decode_literal(text[1]))
    value = getattr(torch, text, None) if kind in dict(TORCH_NAMES) else None
    if value is None:
        raise DumpError(f"the dump holds the {kind} {text!r}, which this torch does not know")
    return value
