"""A package made by `graft new-transform --package` and installed into a folder of its own, with everything that a
package may bring: a transform, an op, a YAML list with counts for a family, and tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from graft.workbench.scaffold.destination import Destination
from graft.workbench.scaffold.plan import Written, new_transform

NAME, OP, MODEL = "fuse_final_cap", "final_cap", "tiny-gemma-2"  # gemma 2 caps its logits: tanh(x / 30) * 30
PATTERN = """
import torch
from torch import Tensor


def capped_by_hand(x: Tensor, cap: float) -> Tensor:
    return torch.tanh(x / cap) * cap
"""


def make_package(folder: Path, package: str = "cap-fusions", name: str = NAME) -> Written:
    (folder / "cap.py").write_text(PATTERN)
    place = Destination.in_package(folder / package)
    made = new_transform(name, place, op=True, stage="schedule", pattern=f"{folder / 'cap.py'}:capped_by_hand")
    listing = place.source / "graft.yaml"
    listing.write_text(listing.read_text() + f"  gemma-2:\n    expect: {{{name}: 1}}\n")
    return made


def install(project: Path, target: Path) -> Path:
    """Without a network: nothing but what lies in the folder, built with what this Python has."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    command += ["--disable-pip-version-check", "--target", str(target), str(project)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target
