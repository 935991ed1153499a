"""Arguments of a pattern may be called what the files of its op have names for: both kernels are right then too."""

from __future__ import annotations

from itertools import product

import pytest

from graft.workbench.autofuse.kernels import native_kernel_problem
from graft.workbench.autofuse.triton_kernels import triton_kernel_problem
from marks import short
from row_cases import RowPattern, fresh, loaded, write

BODIES = {  # with another argument, and its shape
    "product": ("x * torch.tanh(ARG)", "a b c"),
    "rows": ("x / x.abs().sum(-1, keepdim=True) * ARG", "c"),
    "gemm": (
        "torch.nn.functional.linear(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * ARG, matrix)",
        "c",
    ),
}
# of templates, of the lowering, of kernels in Triton and in C++
TAKEN = (
    "weight", "out", "mask", "at", "count", "rows", "given", "value", "size", "layout", "node", "plan",
    "columns", "depth", "room", "row", "head", "next", "a", "n1", "kernel", "w", "acc", "start", "tile",
    "known", "packed", "form", "of", "lead", "strides", "grid", "block", "expanded", "sums", "lanes",
    "result", "first", "last", "team", "sizes",
)  # fmt: skip
SEEN = [("product", "at"), ("rows", "out"), ("rows", "value"), ("gemm", "weight"), ("gemm", "room")]


@pytest.mark.parametrize(("kind", "name"), short(list(product(BODIES, TAKEN)), *SEEN))
def test_an_argument_may_have_any_name(kind, name, tmp_path, monkeypatch):
    monkeypatch.setattr("graft.workbench.autofuse.kernels.packed_cases", lambda _: [])
    body, dims = BODIES[kind]
    shapes = {"x": "a b c", name: dims} | ({"matrix": "d c"} if kind == "gemm" else {})
    given = ", ".join(f"{one}: Tensor" for one in shapes)
    source = f"def own_{kind}_by_hand({given}) -> Tensor:\n    return {body.replace('ARG', name)}"
    pattern = fresh(RowPattern(f"own_{kind}", source, shapes, f"own_{kind}_by_hand({', '.join(shapes)})"))
    written = write(pattern, tmp_path / "row-kernels")
    assert {"native.h", "native.py", "triton.py"} <= {path.name for path in written.files} and not written.no_kernel
    with loaded(tmp_path / "row-kernels", pattern):
        assert triton_kernel_problem(pattern.name, pattern.shapes, "cpu")[0] == ""
        assert native_kernel_problem(pattern.name, pattern.shapes)[0] == ""
