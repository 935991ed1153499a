"""Kernels over rows that graft new-transform writes: right in Triton's interpreter and in C++, and a fault shows."""

from __future__ import annotations

import importlib

import pytest
import torch

from graft.ops import OPS
from graft.passes.patterns import Rewrite
from graft.workbench.autofuse.kernels import inputs, native_kernel_problem
from graft.workbench.scaffold.body import USUAL, Body, functions_of
from graft.workbench.scaffold.row_program import row_program
from graft.workbench.scaffold.row_texts import CPP_ROWS, TRITON_ROWS
from marks import firsts
from row_cases import ADD_NORM, FAULTS, PATTERNS, TRITON, RowFault, RowPattern, fresh, loaded, write


def triton_error(module: str, pattern: RowPattern) -> float:
    """How far the Triton kernel is from the reference in float64, for two widths and three magnitudes."""
    kernel = getattr(importlib.import_module(f"{module}.triton"), f"{pattern.name}_triton")
    worst = 0.0
    for width, scale in ((16, 1.0), (77, 1e-3), (77, 30.0)):
        args = inputs(pattern.shapes, width, scale)
        args = [torch.cat([a, a.flip(-1) * 0.7]) if a.dim() > 1 else a for a in args]  # a batch of two
        args = [a.transpose(0, 1).contiguous().transpose(0, 1) if a.dim() > 1 else a for a in args]
        wanted = OPS[pattern.name].reference(*(a.double() for a in args))
        pairs = zip(*(v if isinstance(v, tuple) else (v,) for v in (kernel(*args), wanted)), strict=True)
        for got, exact in pairs:
            assert got.shape == exact.shape and got.dtype is torch.float32
            top = exact.abs().amax(-1, keepdim=True).clamp_min(1e-30)
            worst = max(worst, float(((got.double() - exact).abs() / top).max().nan_to_num(1e9)))
    return worst


@pytest.mark.parametrize("pattern", firsts(PATTERNS, lambda p: "", 4), ids=lambda p: p.name)
def test_triton_kernels_compute_their_pattern(pattern, tmp_path):
    pattern = fresh(pattern)
    written = write(pattern, tmp_path / "row-kernels")
    assert {"native.h", "native.py", "triton.py"} <= {path.name for path in written.files} and not written.no_kernel
    with loaded(tmp_path / "row-kernels", pattern) as module:
        assert triton_error(module, pattern) < 1e-5


def test_results_have_the_dtype_of_the_model_not_of_a_wide_input(tmp_path):
    source = (
        "def row_table_by_hand(x: Tensor, y: Tensor) -> Tensor:\n"
        "    return y * x.mean(-1, keepdim=True).to(torch.bfloat16)"
    )
    shapes = {"x": "a b c : float32", "y": "a b c"}
    pattern = fresh(RowPattern("row_table", source, shapes, "row_table_by_hand(x, y) * 1.25 + 0.25"))
    write(pattern, tmp_path / "row-kernels")
    with loaded(tmp_path / "row-kernels", pattern) as module:
        kernel = getattr(importlib.import_module(f"{module}.triton"), f"{pattern.name}_triton")
        x, y = torch.randn(2, 3, 16), torch.randn(2, 3, 16, dtype=torch.bfloat16)
        got, wanted = kernel(x, y), OPS[pattern.name].reference(x, y)
    assert got.dtype is wanted.dtype is torch.bfloat16
    torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.02)


def test_a_reduction_of_one_number_is_that_number(tmp_path):
    source = (
        "def row_twice_by_hand(x: Tensor) -> Tensor:\n    return x * x.mean(-1, keepdim=True).sum(-1, keepdim=True)"
    )
    pattern = fresh(RowPattern("row_twice", source, {"x": "a b c"}, "row_twice_by_hand(x) * 1.25 + 0.25"))
    write(pattern, tmp_path / "row-kernels")
    with loaded(tmp_path / "row-kernels", pattern) as module:
        assert triton_error(module, pattern) < 1e-5


@pytest.mark.parametrize("pattern", firsts(PATTERNS, lambda p: "", 2), ids=lambda p: p.name)
def test_native_kernels_compute_their_pattern(pattern, tmp_path):
    pattern = fresh(pattern)
    write(pattern, tmp_path / "row-kernels")
    with loaded(tmp_path / "row-kernels", pattern):
        problem, runs = native_kernel_problem(pattern.name, pattern.shapes)
    assert not problem and runs >= 3


@pytest.mark.some(2)
@pytest.mark.parametrize("fault", firsts(FAULTS, lambda f: f.template, 3), ids=lambda f: f"{f.pattern.name}: {f.new}")
def test_a_fault_in_the_generator_is_found(fault: RowFault, tmp_path, monkeypatch):
    fault.plant(monkeypatch)
    pattern = fresh(fault.pattern)
    write(pattern, tmp_path / "row-faults")
    with loaded(tmp_path / "row-faults", pattern) as module:
        if fault.template == TRITON:
            assert not triton_error(module, pattern) < 1e-5
        else:
            problem, _ = native_kernel_problem(pattern.name, pattern.shapes)
            assert "is off by" in problem


def refusal(source: str, shapes: dict[str, str]) -> str:
    body = Body(source, None, USUAL, shapes)
    pattern, _ = functions_of(body)
    found = [row_program(body, Rewrite(pattern, pattern, shapes), language) for language in (TRITON_ROWS, CPP_ROWS)]
    assert found[0] == found[1] and isinstance(found[0], str)
    return found[0]


@pytest.mark.parametrize(
    ("body", "shapes", "reason"),
    [
        ("x.mean(-2, keepdim=True) + x", {"x": "a b c"}, "reduces other dims than the last"),
        ("x.sum(-1)", {"x": "a b c"}, "reduces other dims than the last, or drops it"),
        ("x[..., 0:2000].mean(-1, keepdim=True) + x", {"x": "a b c"}, "something else with wide rows"),
        ("x[..., 1:].amax(-1, keepdim=True) + x", {"x": "a b c"}, "part of a row whose width is not known"),
        ("x - x.to(torch.int32).to(torch.float32)", {"x": "a b c"}, "casts to torch.int32"),
        ("x * x.to(torch.bool).to(x.dtype)", {"x": "a b c"}, "casts to torch.bool"),
        ("x[..., : x.shape[-1] // 2] * x[..., x.shape[-1] // 2 :]", {"x": "a b c"}, "does not run at sizes"),
        ("x[..., 0:1] * x", {"x": "a b 8"}, "takes a single column"),
        ("x[:, 0:2]", {"x": "a b 8"}, "its results have other rows"),
        ("torch.cumsum(x, -1) * x", {"x": "a b c"}, "not an op that can be generated"),
        ("x * 2.0", {"x": "c"}, "its tensors have 1 dims"),
        ("torch.matmul(x, x.transpose(-1, -2))", {"x": "a b c"}, "not an op that can be generated"),
    ],
)
def test_what_is_no_program_over_rows_says_why(body, shapes, reason):
    assert reason in refusal(f"def taken_by_hand(x: Tensor) -> Tensor:\n    return {body}", shapes)


def test_norms_and_softmax_are_taken_apart():
    shapes = {"x": "a b c", "weight": "c"}
    for text in ("torch.ops.graft.rms_norm(x, weight, 1e-06) + x", "torch.softmax(x, -1) * weight"):
        body = Body(
            f"def taken_by_hand(x: Tensor, weight: Tensor) -> Tensor:\n    return {text}", None, USUAL, shapes
        )
        pattern, _ = functions_of(body)
        found = row_program(body, Rewrite(pattern, pattern, shapes), CPP_ROWS)
        assert not isinstance(found, str) and any(block.kind in ("mean", "sum") for block in found.blocks)


def test_equal_patterns_give_equal_files(tmp_path):
    texts = []
    for folder in ("one", "two"):
        written = write(ADD_NORM, tmp_path / folder / "same-kernels")
        texts.append({path.name: path.read_text() for path in written.files})
    assert texts[0] == texts[1]
