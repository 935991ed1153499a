"""The testing kit and generated transforms on a GPU: the matrix, Inductor's Triton kernels, a generated kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graft
from graft.testing import assert_matches_eager, assert_no_recompiles, generated_kernels, matrix
from graft.workbench.scaffold.plan import new_transform

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SOURCE = Path(graft.__file__).parents[1]
X = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0))
PATTERN = """
import torch
from torch import Tensor


def capped(x: Tensor, cap: float) -> Tensor:
    return torch.tanh(x / cap) * cap
"""


class Gated(nn.Module):
    def forward(self, x):
        return F.silu(x) * x.sin()


class Wrong(nn.Module):
    def forward(self, x):
        return F.gelu(x) * x.sin()


@matrix(devices=("cuda",))
def test_eager_against_compiled(dtype, device):
    assert_matches_eager(Gated(), (X,), "fuse_swiglu", dtype=dtype, device=device, roundings=4, wrong=Wrong())


def test_triton_kernels_of_inductor_are_read():
    made = generated_kernels(lambda x: x.sin() * x.cos(), X.cuda())
    assert [kernel.language for kernel in made.kernels] == ["triton"] and "sin" in made.kernels[0].source
    torch.testing.assert_close(made.result, (X.sin() * X.cos()).cuda())


def test_another_capture_is_told():
    compiled = graft.compile(
        Gated(), (X.cuda(),), backend="cuda_graph", dynamic_shapes=({1: torch.export.Dim.DYNAMIC},)
    )
    assert_no_recompiles(compiled, [(X.cuda(),), (X.cuda() + 1,)])
    with pytest.raises(AssertionError, match=r"call 2 with .* compiled again"):
        assert_no_recompiles(compiled, [(X.cuda(),), (X.cuda()[:, :2].contiguous(),)])


def test_generated_ops_pass_their_tests_with_their_kernel(tmp_path):
    """Without Triton's interpreter: the kernel is compiled, and `auto` takes it."""
    (tmp_path / "mine.py").write_text(PATTERN)
    new_transform(
        "fuse_soft_cap", tmp_path / "p", op=True, pattern=f"{tmp_path / 'mine.py'}:capped", stage="schedule"
    )
    new_transform("fuse_plain", tmp_path / "p", op=True)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "."]
    done = subprocess.run(command, cwd=tmp_path / "p", env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout + done.stderr
