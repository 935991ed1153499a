"""Arguments of a pattern may be called what the files of its op have names for: both kernels are right then too."""

from __future__ import annotations

from itertools import product

import pytest

from graft.workbench.autofuse.kernels import native_kernel_problem
from graft.workbench.autofuse.triton_kernels import triton_kernel_problem
from marks import left_out
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
# the short run compiles a program of each kind, with several arguments
SEEN = [("product", ("at", "mask", "count")), ("rows", ("out", "value", "acc")), ("gemm", ("weight", "room"))]
ALONE = [left_out((kind, (name,))) for kind, name in product(BODIES, TAKEN)]


@pytest.mark.parametrize(("kind", "names"), [*SEEN, *ALONE])
def test_an_argument_may_have_any_name(kind, names, tmp_path, monkeypatch):
    monkeypatch.setattr("graft.workbench.autofuse.kernels.packed_cases", lambda _: [])
    body, dims = BODIES[kind]
    shapes = {"x": "a b c"} | dict.fromkeys(names, dims) | ({"matrix": "d c"} if kind == "gemm" else {})
    given = ", ".join(f"{one}: Tensor" for one in shapes)
    source = f"def own_{kind}_by_hand({given}) -> Tensor:\n    return {body.replace('ARG', ' * '.join(names))}"
    pattern = fresh(RowPattern(f"own_{kind}", source, shapes, f"own_{kind}_by_hand({', '.join(shapes)})"))
    written = write(pattern, tmp_path / "row-kernels")
    assert {"native.h", "native.py", "triton.py"} <= {path.name for path in written.files} and not written.no_kernel
    with loaded(tmp_path / "row-kernels", pattern):
        assert triton_kernel_problem(pattern.name, pattern.shapes, "cpu")[0] == ""
        assert native_kernel_problem(pattern.name, pattern.shapes)[0] == ""
