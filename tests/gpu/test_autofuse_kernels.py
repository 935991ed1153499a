"""Kernels that autofuse writes, tried by themselves on a GPU: right ones pass, planted faults are found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from generated_faults import FAULTS, TRITON, GeneratedFault
from graft.workbench.autofuse.triton_kernels import triton_kernel_problem
from graft.workbench.scaffold.destination import Destination
from row_cases import GEMMS, PATTERNS, PEAK, RowPattern, fresh, loaded, write

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("pattern", (*PATTERNS, PEAK, *GEMMS), ids=lambda pattern: pattern.name)
def test_what_is_written_is_right(pattern, tmp_path):
    pattern = fresh(pattern)
    write(pattern, tmp_path / "gpu-kernels")
    with loaded(tmp_path / "gpu-kernels", pattern):
        problem, calls = triton_kernel_problem(pattern.name, pattern.shapes, "cuda")
    assert not problem and calls >= 20


def tame(fault: GeneratedFault) -> bool:
    """It reads and writes where there is memory: an illegal access would end the process, as it does in a trial."""
    near = not any(
        word in fault.title for word in ("BLOCK", "block", "(n0 * n1", ".stride()", "row * ", "_s1", "_s2")
    )
    return isinstance(fault.subject, RowPattern) and fault.file == TRITON and not fault.wild and near


@pytest.mark.parametrize("fault", [one for one in FAULTS if tame(one)], ids=lambda fault: fault.title)
def test_a_fault_is_found(fault, tmp_path):
    """Layouts, tails, NaN, dtypes and numbers: none hides because a copy to the GPU lies otherwise."""
    pattern = fresh(fault.subject)
    write(pattern, tmp_path / "gpu-faults")
    replace(fault, subject=pattern).plant(Destination.in_package(tmp_path / "gpu-faults"), pattern.name)
    try:
        with loaded(tmp_path / "gpu-faults", pattern):
            problem, _ = triton_kernel_problem(pattern.name, pattern.shapes, "cuda")
    except Exception as error:  # noqa: BLE001  the kernel's own, with which a trial ends
        problem = str(error)
    assert problem
