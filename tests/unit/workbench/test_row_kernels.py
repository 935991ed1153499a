"""Kernels over rows that graft new-transform writes: right in Triton's interpreter and in C++, and a fault shows."""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import partial

import pytest
import torch

from generated_faults import FAULTS, NATIVE, OP, TRITON, GeneratedFault
from graft.passes.patterns import Rewrite
from graft.workbench.autofuse.kernels import native_kernel_problem
from graft.workbench.autofuse.triton_kernels import triton_kernel_problem
from graft.workbench.scaffold.body import USUAL, Body, functions_of
from graft.workbench.scaffold.destination import Destination
from graft.workbench.scaffold.gemm_program import gemm_program
from graft.workbench.scaffold.gemm_texts import CPP_TILES, TRITON_TILES
from graft.workbench.scaffold.row_program import row_program
from graft.workbench.scaffold.row_texts import CPP_ROWS, TRITON_ROWS
from marks import FULL, left_out, short
from row_cases import ADD_NORM, GATED, GEMM_NORMED, GEMMS, PATTERNS, RANGED, WIDE, RowPattern, fresh, loaded, write


@pytest.mark.parametrize("pattern", short(list(PATTERNS), ADD_NORM, GATED, RANGED), ids=lambda p: p.name)
def test_triton_kernels_compute_their_pattern(pattern, tmp_path):
    pattern = fresh(pattern)
    written = write(pattern, tmp_path / "row-kernels")
    assert {"native.h", "native.py", "triton.py"} <= {path.name for path in written.files} and not written.no_kernel
    with loaded(tmp_path / "row-kernels", pattern):
        problem, calls = triton_kernel_problem(pattern.name, pattern.shapes, "cpu")
    assert not problem and calls >= 20


SHORT = [one if one is GEMM_NORMED else left_out(one) for one in GEMMS]  # it has a prologue and an epilogue


@pytest.mark.parametrize("pattern", SHORT, ids=lambda p: p.name)
def test_gemms_with_what_stands_before_and_behind_them(pattern, tmp_path, monkeypatch):
    """Both kernels: few rows and more than a tile of them, tails in every dim, magnitudes, dtypes, layouts. C++ is
    what it costs, so that the short run has float weights alone."""
    if not FULL:
        monkeypatch.setattr("graft.workbench.autofuse.kernels.packed_cases", lambda _: [])
    pattern = fresh(pattern)
    written = write(pattern, tmp_path / "row-kernels")
    assert {"native.h", "native.py", "triton.py"} <= {path.name for path in written.files} and not written.no_kernel
    with loaded(tmp_path / "row-kernels", pattern):
        problem, calls = triton_kernel_problem(pattern.name, pattern.shapes, "cpu")
        assert not problem and calls >= 30
        problem, calls = native_kernel_problem(pattern.name, pattern.shapes)
        assert not problem and calls >= 9


def test_results_have_the_dtype_of_the_model_not_of_a_wide_input(tmp_path):
    pattern = fresh(WIDE)
    write(pattern, tmp_path / "row-kernels")
    with loaded(tmp_path / "row-kernels", pattern) as module:
        assert triton_kernel_problem(pattern.name, pattern.shapes, "cpu")[0] == ""
        kernel = getattr(importlib.import_module(f"{module}.triton"), f"{pattern.name}_triton")
        x, y = torch.randn(2, 3, 16), torch.randn(2, 3, 16, dtype=torch.bfloat16)
        assert kernel(x, y).dtype is torch.bfloat16


@pytest.mark.exhaustive
def test_a_reduction_of_one_number_is_that_number(tmp_path):
    source = (
        "def row_twice_by_hand(x: Tensor) -> Tensor:\n    return x * x.mean(-1, keepdim=True).sum(-1, keepdim=True)"
    )
    pattern = fresh(RowPattern("row_twice", source, {"x": "a b c"}, "row_twice_by_hand(x) * 1.25 + 0.25"))
    write(pattern, tmp_path / "row-kernels")
    with loaded(tmp_path / "row-kernels", pattern):
        assert triton_kernel_problem(pattern.name, pattern.shapes, "cpu")[0] == ""


@pytest.mark.exhaustive  # reductions in C++: test_argument_names.py; parts of rows: Triton has the same program
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p.name)
def test_native_kernels_compute_their_pattern(pattern, tmp_path):
    pattern = fresh(pattern)
    write(pattern, tmp_path / "row-kernels")
    with loaded(tmp_path / "row-kernels", pattern):
        problem, runs = native_kernel_problem(pattern.name, pattern.shapes)
    assert not problem and runs >= 3


# of each kind one: last tile, one token, several sequences, 32 bits, NaN, layouts, dtypes
KINDS = (
    "count % BLOCK",
    "> 80:",
    "becomes (n1 * n2,)",
    "becomes tl.max(",
    "s0 = folded",  # of a GEMM: a prologue of several blocks, more rows than a tile
    "becomes max(1, count // rows)",
)


def of_a_kernel(fault: GeneratedFault) -> bool:
    table = fault.file == OP and ("call" in fault.old or "_triton(" in fault.old)
    tame = isinstance(fault.subject, RowPattern) and not fault.wild  # the others are for a process of their own
    return tame and (table or fault.file in (TRITON, NATIVE))


def first_of_its_kind(fault: GeneratedFault) -> bool:
    """Some stand for several patterns."""
    others = [one for one in FAULTS if of_a_kernel(one) and one.file != NATIVE]
    return any(fault is next(one for one in others if kind in one.title) for kind in KINDS if kind in fault.title)


@pytest.mark.parametrize(
    "fault",
    [fault if first_of_its_kind(fault) else left_out(fault) for fault in FAULTS if of_a_kernel(fault)],
    ids=lambda fault: fault.title,
)
def test_a_fault_in_a_generated_kernel_is_found(fault, tmp_path):
    """The other faults, and the parts of the trial that judge them: tests/autofuse_faults.py."""
    pattern = fresh(fault.subject)
    write(pattern, tmp_path / "row-faults")
    replace(fault, subject=pattern).plant(Destination.in_package(tmp_path / "row-faults"), pattern.name)
    try:
        with loaded(tmp_path / "row-faults", pattern):
            judge = native_kernel_problem if fault.file == NATIVE else partial(triton_kernel_problem, device="cpu")
            problem, _ = judge(pattern.name, pattern.shapes)
    except Exception as error:  # noqa: BLE001  the kernel's own, with which a trial ends
        problem = str(error)
    assert problem


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


def gemm_refusal(source: str, shapes: dict[str, str]) -> str:
    body = Body(source, None, USUAL, shapes)
    pattern, _ = functions_of(body)
    found = [
        gemm_program(body, Rewrite(pattern, pattern, shapes), language) for language in (TRITON_TILES, CPP_TILES)
    ]
    assert found[0] == found[1] and isinstance(found[0], str)
    return found[0]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("torch.relu(x)", "it has no linear layers"),
        ("F.linear(x, weight) + F.linear(y, weight)", "it has 2 linear layers"),
        ("F.linear(x, weight * 2)", "the weight of its GEMM is computed"),
        ("F.linear(x, weight) * weight.sum()", "read by something else too"),
        ("F.linear(x[0], weight)", "the rows of its GEMM are not of 3 dims"),
        ("F.linear(torch.tanh(x), weight) + torch.tanh(x).sum()", "is read by the GEMM and behind it"),
        ("F.linear(x, weight).mean(-1, keepdim=True)", "behind its GEMM is not computed number by number"),
        ("F.linear(x, weight)[..., 0:4] * 2", "behind its GEMM is not computed number by number"),
        ("F.linear(x.cumsum(-1), weight)", "not an op that can be generated"),
        ("F.linear(x[..., 0:2000] * 2, weight)", "something else with wide rows"),
        ("F.linear(torch.cat([x, y], -1), weight)", "before its GEMM puts parts of rows together"),
    ],
)
def test_what_is_no_gemm_with_a_prologue_and_an_epilogue_says_why(body, reason):
    shapes = {"x": "a b 8", "y": "a b 8", "weight": "d 16"}
    if "cat" not in body:
        shapes = {"x": "a b c", "y": "a b c", "weight": "d c"}
    source = f"def taken_by_hand(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:\n    return {body}"
    assert reason in gemm_refusal(source, shapes)


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
