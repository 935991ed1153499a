"""A package made by `graft new-transform --package` and installed into a folder of its own, with everything that a
package may bring: a transform, an op, a YAML list with counts for a family, and tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

import graft
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
    """Into a folder."""
    pip_install(sys.executable, "--target", str(target), str(project))
    return target


def install_afresh(project: Path, folder: Path) -> Path:
    """Into a virtual environment that has graft, what graft needs, and this package; its Python."""
    done = subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=False)
    assert done.returncode == 0
    (site,) = folder.glob("lib/python*/site-packages")
    needed = [Path(graft.__file__).parents[1], Path(torch.__file__).parents[1]]
    (site / "needed.pth").write_text("".join(f"{path}\n" for path in needed))
    python = folder / "bin" / "python"
    pip_install(str(python), str(project))
    return python


def pip_install(python: str, *arguments: str) -> None:
    """Without a network: nothing but what lies in the folder, built with what this Python has."""
    command = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command += ["--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
