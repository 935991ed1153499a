"""Devices and dtypes by name."""

from __future__ import annotations

import torch

from graft.base.errors import UsageError, near

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def resolve_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"unknown device {device!r}; use cpu, cuda, cuda:1 or meta") from error
    if target.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("no GPU is available here; use device='cpu'")
    return target


def resolve_dtype(dtype: str, device: torch.device, stored: torch.dtype) -> torch.dtype:
    """`auto` keeps the checkpoint's dtype on a GPU and is float32 on a CPU, where torch's 16-bit matrix-vector
    kernels are slower: SmolLM2, batch 1: float32 is 1.1 x as fast with AVX-512 BF16 (2 cores), and 1.6 x without
    16-bit instructions (1 core, widen_linear on)."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else stored
    if dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}{near(dtype, [*DTYPES, 'auto'])}")
    return DTYPES[dtype]
