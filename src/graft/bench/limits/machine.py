"""Where and with what a measurement was taken."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

PACKAGES = ("graft", "transformers", "triton")


def facts(device: torch.device) -> dict[str, Any]:
    """Device, versions and date: part of every JSON document with times."""
    return {
        "device": str(device),
        "device_name": device_name(device),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{package: installed(package) for package in PACKAGES},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
