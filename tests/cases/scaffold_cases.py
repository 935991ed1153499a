"""What the tests of graft new-transform share: functions to make transforms of, and a copy of the tree."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import graft

SOURCE = Path(graft.__file__).parents[1]
ROOT = SOURCE.parent
FUNCTIONS = """
import math

import torch
import torch.nn.functional as F
from torch import Tensor

SCALE = 2.0


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    h = x.float()
    return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def known(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.ops.graft.rms_norm(x, weight, eps)


def off(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.ops.graft.rms_norm(x, weight, eps) * 1.01


def swapped(weight: Tensor, x: Tensor, eps: float) -> Tensor:
    return torch.ops.graft.rms_norm(x, weight, eps)


def scaled(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight * SCALE


def branching(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight if x.sum() > 0 else x


def rolled(x: Tensor) -> Tensor:
    return torch.flip(x, [-1]) * x


def repeated(x: Tensor, n: int) -> Tensor:
    return x.exp() * n


def projected(x: Tensor, w: Tensor) -> Tensor:
    return F.relu(F.linear(x, w)).square()


def looked_up(ids: Tensor, weight: Tensor) -> Tensor:
    return torch.sin(F.embedding(ids, weight))


def own_tensor(x: Tensor) -> Tensor:
    return x * torch.tensor([1.0, 2.0])


def written(x: Tensor, cache: Tensor) -> Tensor:
    cache.copy_(x)
    return x + 1


def raising(x: Tensor) -> Tensor:
    return x * [][0]


def capped(x: Tensor, cap: float, slope: float) -> Tensor:
    return torch.tanh(x / cap) * cap - slope * x
"""
GATED = """
import torch.nn.functional as F
from torch import Tensor

SHAPES = {"gate": "t d", "up": "t d"}


def squared_relu_gate(gate: Tensor, up: Tensor) -> Tensor:
    return F.relu(gate).square() * up
"""


@pytest.fixture(name="functions")
def functions_file(tmp_path):
    path = tmp_path / "functions" / "mine.py"
    path.parent.mkdir()
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture(name="checkout")
def checkout_folder(tmp_path):
    """The parts of the tree that the generator and the rules of the code look at."""
    root = tmp_path / "checkout"
    shutil.copytree(SOURCE / "graft", root / "src" / "graft", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "tests" / "unit").mkdir(parents=True)
    shutil.copy(ROOT / "pyproject.toml", root)
    for name in ("conftest.py", "marks.py"):
        shutil.copy(ROOT / "tests" / name, root / "tests")
    for name in ("test_structure.py", "ops/test_ops.py", "models/test_models.py"):
        target = root / "tests" / "unit" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "tests" / "unit" / name, target)
    return root
