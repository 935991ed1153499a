"""Faults in what `graft autofuse` generates: a pattern, a file of its package, a right text, a wrong one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from graft.workbench.scaffold.destination import Destination
from row_cases import (
    ADD_NORM,
    GATED,
    GEMM_GATED,
    GEMM_NORMED,
    GEMM_RANGED,
    PEAK,
    PRODUCT,
    RANGED,
    ROTATED,
    SOFTCAPPED,
    WIDE,
    RowPattern,
)

NATIVE, TRITON, LOWERING, OP, REFERENCE = "native.h", "triton.py", "native.py", "op.py", "reference.py"
TRANSFORM, ALL = "the transform", "every file of the op"
# candidates of a Llama whose fusions are off, by their calls
NORM, ROPE, GATE = "pow → mean → add → rsqrt → mul → mul", "mul → neg → cat → mul → add", "silu → mul"
GATED_GEMM, SIBLINGS = "silu → linear → mul", "q_proj + k_proj + v_proj"

# a walk that asks nobody who else reads a weight, and one that gives the first layer the numbers of the last
UNCHECKED = """layers = LAYERS

    def find(self, run, member):
        from graft.passes.library.merge.linears import merge_match

        return merge_match(member.group)
"""
EXCHANGED = """layers = LAYERS

    def write(self, run, match):
        made = super().write(run, match)
        first, last = made[2], made[-1]
        first.args, last.args = last.args, first.args
        return made
"""


@dataclass(frozen=True)
class GeneratedFault:
    """subject: a pattern, or the calls of a candidate of a model, where the trial goes on in that model. wild: it
    reads or writes so far away that the process may end."""

    subject: RowPattern | str
    file: str
    old: str
    new: str
    wild: bool = False

    @property
    def title(self) -> str:
        name = self.subject.name if isinstance(self.subject, RowPattern) else self.subject
        return f"{name}, {self.file}: {' '.join(self.old.split())} becomes {' '.join(self.new.split()) or 'nothing'}"

    def plant(self, package: Destination, name: str) -> None:
        """In the package of fuse_`name`, which was written."""
        folder = package.op_folder(name)
        files = [package.transform(f"fuse_{name}") if self.file == TRANSFORM else folder / self.file]
        if self.file == ALL:
            files = [path for path in folder.iterdir() if path.is_file()]
        found = [path for path in files if self.old in path.read_text()]
        assert found, files[0].read_text()
        for path in found:
            write(path, path.read_text(), self)


def write(path: Path, text: str, fault: GeneratedFault) -> None:
    path.write_text(text.replace(fault.old, fault.new, -1 if fault.file == ALL else 1))


FAULTS = (
    GeneratedFault(ADD_NORM, NATIVE, " / static_cast<float>(n_c)", ""),
    GeneratedFault(ADD_NORM, NATIVE, "1e-06f", "1e-05f"),
    GeneratedFault(ADD_NORM, NATIVE, "row_sum(0, n_c", "row_sum(0, n_c - 1"),
    GeneratedFault(ADD_NORM, NATIVE, "t2 * t2", "t2 * t1"),
    GeneratedFault(ADD_NORM, NATIVE, "r_out1[i] = ", "r_out1[i] = 1.001f * "),
    GeneratedFault(ADD_NORM, NATIVE, "1.0f / std::sqrt", "std::sqrt"),
    GeneratedFault(ROTATED, NATIVE, "r_x[i+4]", "r_x[i+3]"),
    GeneratedFault(ROTATED, NATIVE, "(-t", "(t"),
    GeneratedFault(ROTATED, NATIVE, "int64_t i = 4", "int64_t i = 5"),
    GeneratedFault(ROTATED, NATIVE, "a.in_x.heads == 1 ? 0 : head", "0"),
    GeneratedFault(GATED, NATIVE, "r_x[i+20]", "r_x[i]"),
    GeneratedFault(GATED, NATIVE, "relu(", "std::fabs("),
    GeneratedFault(RANGED, NATIVE, "row_max", "row_min"),
    GeneratedFault(RANGED, NATIVE, "a.in_weight[i]", "a.in_weight[0]"),
    GeneratedFault(ADD_NORM, TRITON, "s0 / n_c", "s0 / (n_c + 1)"),
    GeneratedFault(ADD_NORM, TRITON, "mask = i < n_c", "mask = i < n_c - 1"),
    GeneratedFault(ADD_NORM, TRITON, "tl.rsqrt", "tl.sqrt"),
    GeneratedFault(ADD_NORM, TRITON, "i1 * x_s1", "i1 * x_s2"),
    GeneratedFault(ROTATED, TRITON, "r_x + i+4", "r_x + i+3"),
    GeneratedFault(ROTATED, TRITON, "= -t", "= t"),
    GeneratedFault(ROTATED, TRITON, "i1 * y_s1", "row * y_s1 + i1"),
    GeneratedFault(GATED, TRITON, "r_x + i+20", "r_x + i"),
    GeneratedFault(GATED, TRITON, "= relu(", "= tl.maximum(0.0, "),
    GeneratedFault(RANGED, TRITON, "row_max(tl.where", "row_min(tl.where"),
    GeneratedFault(RANGED, TRITON, 'float("-inf")', "0.0"),
    # what is read: another input, another row, a neighbour, too little
    GeneratedFault(ADD_NORM, NATIVE, "r_y[i]", "r_x[i]"),
    GeneratedFault(ADD_NORM, NATIVE, "a.in_weight[i]", "a.in_weight[i / 2]"),
    GeneratedFault(ROTATED, NATIVE, "r_y[i]", "1.0f"),
    GeneratedFault(ROTATED, NATIVE, "r_z[i]", "r_y[i]"),
    GeneratedFault(GATED, NATIVE, "i < 20", "i < 19"),
    GeneratedFault(RANGED, NATIVE, "row_min(0, n_c", "row_min(1, n_c"),
    GeneratedFault(SOFTCAPPED, NATIVE, "(t0 - s0)", "(t0 + s0)"),
    GeneratedFault(SOFTCAPPED, NATIVE, "row_sum(0, n_c", "row_sum(1, n_c"),
    GeneratedFault(ADD_NORM, TRITON, "r_y + i", "r_x + i"),
    GeneratedFault(ADD_NORM, TRITON, "weight_ptr + i", "weight_ptr + i // 2"),
    GeneratedFault(ROTATED, TRITON, "r_z + i", "r_y + i"),
    GeneratedFault(GATED, TRITON, "mask = i < 20", "mask = i < 16"),
    GeneratedFault(SOFTCAPPED, TRITON, "i1 * y_s1", "i1 * y_s2"),
    # what is computed: another function, sign, number or order
    GeneratedFault(ADD_NORM, NATIVE, "row_sum", "row_max"),
    GeneratedFault(GATED, NATIVE, "(t1 * t1)", "(t1 + t1)"),
    GeneratedFault(RANGED, NATIVE, "0.5f", "0.25f"),
    GeneratedFault(RANGED, NATIVE, " / ", " * "),
    GeneratedFault(SOFTCAPPED, NATIVE, "4.0f", "4.5f"),
    GeneratedFault(SOFTCAPPED, NATIVE, "0.125f", "0.12f"),
    GeneratedFault(SOFTCAPPED, NATIVE, "plain_tanh", "std::sin"),
    GeneratedFault(ADD_NORM, TRITON, "1e-06", "1e-05"),
    GeneratedFault(GATED, TRITON, "* t", "+ t"),
    GeneratedFault(RANGED, TRITON, "0.5", "0.25"),
    GeneratedFault(SOFTCAPPED, TRITON, "4.0", "4.5"),
    GeneratedFault(SOFTCAPPED, TRITON, "tl.sum(tl.where", "row_max(tl.where"),
    # what is written
    GeneratedFault(ADD_NORM, NATIVE, "r_out0[i] = ", "r_out0[i] = 0.999f * "),
    GeneratedFault(ADD_NORM, TRITON, "tl.store(r_out1 + i, ", "tl.store(r_out1 + i, 1.001 * "),
    GeneratedFault(ROTATED, TRITON, "tl.store(r_out + i, ", "tl.store(r_out + i, 0.999 * "),
    GeneratedFault(SOFTCAPPED, TRITON, "out_ptr + row * n_c", "out_ptr + (row // 2) * n_c"),
    # ── by element ──────────────────────────────────────────────────────────────────────────────────────────────
    GeneratedFault(PRODUCT, TRITON, "mask = at < count", "mask = at < count - 1"),
    GeneratedFault(PRODUCT, TRITON, "mask = at < count", "mask = at < count + 1"),
    GeneratedFault(PRODUCT, TRITON, "mask = at < count", "mask = at < count // BLOCK * BLOCK + (count % BLOCK) // 2"),
    GeneratedFault(PRODUCT, TRITON, "* BLOCK + tl", "* (BLOCK - 1) + tl"),
    GeneratedFault(PRODUCT, TRITON, "triton.cdiv(out.numel(), BLOCK)", "max(1, out.numel() // BLOCK)"),
    GeneratedFault(PRODUCT, TRITON, "if out.numel():", "if out.numel() > 80:"),
    GeneratedFault(PRODUCT, TRITON, "if out.numel():", "if out.shape[0] == 1:"),
    GeneratedFault(PRODUCT, TRITON, "in_x.contiguous()", "in_x"),
    GeneratedFault(PRODUCT, TRITON, "in_y.contiguous()", "in_y"),
    GeneratedFault(PRODUCT, TRITON, "dtype=in_x.dtype", "dtype=torch.float32"),
    GeneratedFault(PRODUCT, TRITON, "dtype=in_x.dtype", "dtype=torch.bfloat16"),
    GeneratedFault(PRODUCT, TRITON, "torch.empty(in_x.shape", "torch.empty(in_x.shape[1:]"),
    GeneratedFault(PRODUCT, TRITON, "= silu(", "= tl.abs("),
    GeneratedFault(PRODUCT, TRITON, "tl.store(out + at", "tl.store(x_ptr + at"),
    GeneratedFault(
        PRODUCT, TRITON, "    tl.store(out", "    tl.store(x_ptr + at, in_x * 0.0, mask=mask)\n    tl.store(out"
    ),
    GeneratedFault(PRODUCT, TRITON, "y_ptr + at", "x_ptr + at"),
    GeneratedFault(PRODUCT, TRITON, "y_ptr + at", "y_ptr + at + 1"),
    GeneratedFault(PRODUCT, NATIVE, "i < a.out.size", "i < a.out.size / 16 * 16"),
    GeneratedFault(PRODUCT, NATIVE, "i < a.out.size", "i <= a.out.size"),
    GeneratedFault(PRODUCT, NATIVE, "a.in_y.at(row, head)", "a.in_y.at(0, head)"),
    GeneratedFault(PRODUCT, NATIVE, "share(next, a.rows,", "share(next, a.rows - 1,"),
    GeneratedFault(PRODUCT, NATIVE, "share(next, a.rows,", "share(next, a.rows + 1,"),
    GeneratedFault(PRODUCT, NATIVE, "out[i] = ", "const_cast<float*>(r_x)[i] = out[i] = "),
    GeneratedFault(PRODUCT, NATIVE, "  share(next", "  if (a.rows == 1) return;\n  share(next"),
    GeneratedFault(PRODUCT, LOWERING, 'y = plan.value(given["y"])', 'y = plan.value(given["x"])'),
    GeneratedFault(PRODUCT, LOWERING, "in_x=in_x, in_y=in_y", "in_x=in_y, in_y=in_x"),
    # ── by row: sizes, layouts, numbers that are not finite, dtypes ─────────────────────────────────────────────
    GeneratedFault(ADD_NORM, TRITON, ".to(tl.int64)", ""),
    GeneratedFault(ADD_NORM, TRITON, "[t if t.stride(-1) == 1 else t.contiguous() for t", "[t for t"),
    GeneratedFault(ADD_NORM, TRITON, "*t.stride()[:-1]", "*t.contiguous().stride()[:-1]"),
    GeneratedFault(ADD_NORM, TRITON, "in_weight.contiguous()", "in_weight"),
    GeneratedFault(ADD_NORM, TRITON, "n1, n2, *strides", "n2, n1, *strides"),
    GeneratedFault(ROTATED, TRITON, "i0 * x_s0 + ", ""),
    GeneratedFault(ADD_NORM, TRITON, "r_out0 = out0_ptr + row * n_c", "r_out0 = out0_ptr + row % n2 * n_c"),
    GeneratedFault(ADD_NORM, TRITON, "max((n_c,))", "n_c // 2"),
    GeneratedFault(ROTATED, TRITON, "(n0 * n1 * n2,)](", "(n1 * n2,)]("),
    GeneratedFault(
        ADD_NORM, TRITON, "mask = i < n_c\n    t0 = tl.load(weight", "mask = i < n_c + 1\n    t0 = tl.load(weight"
    ),
    GeneratedFault(ADD_NORM, TRITON, "t3 = t2 * t2", "t3 = (t2 * t2).to(x_ptr.dtype.element_ty).to(tl.float32)"),
    GeneratedFault(ADD_NORM, TRITON, "s0 = s0 / n_c", "s0 = (s0.to(x_ptr.dtype.element_ty) / n_c).to(tl.float32)"),
    GeneratedFault(ADD_NORM, TRITON, "dtype=in_x.dtype)\n    out1", "dtype=torch.float32)\n    out1"),
    GeneratedFault(ADD_NORM, TRITON, "return out0, out1", "return out1, out0"),
    GeneratedFault(ADD_NORM, TRITON, "return out0, out1", "return out0, in_x"),
    GeneratedFault(ADD_NORM, TRITON, "tl.store(r_out1 + i", "tl.store(r_x + i"),
    GeneratedFault(ADD_NORM, NATIVE, "share(next, a.rows,", "share(next, a.rows / 2 * 2,"),
    GeneratedFault(ADD_NORM, NATIVE, "i < n_c; ++i", "i < n_c; i += 2"),
    GeneratedFault(ADD_NORM, NATIVE, "r_out1[i] = t3;", "r_out1[i] = t3; if (i == 0) r_out1[n_c] = t3;"),
    GeneratedFault(ADD_NORM, LOWERING, '("out0", "out1",)', '("out0",)'),
    GeneratedFault(ADD_NORM, LOWERING, "(out0, out1))", "(out1, out0))"),
    GeneratedFault(PEAK, TRITON, "row_max(tl.where", "tl.max(tl.where"),
    GeneratedFault(
        SOFTCAPPED,
        TRITON,
        "t0 = tl.load(r_x + i, mask=mask, other=0.0)",
        "t0 = tl.load(r_x + i + 1, mask=mask, other=0.0)",
    ),
    GeneratedFault(GATED, NATIVE, "relu(", "std::fmax(0.0f, "),
    GeneratedFault(RANGED, NATIVE, "row_max(0, n_c", "row_max(0, n_c / 16 * 16"),
    GeneratedFault(RANGED, TRITON, 'float("-inf")', "-1000.0"),
    GeneratedFault(RANGED, TRITON, 'float("inf")', "1e29"),
    GeneratedFault(PEAK, TRITON, 'float("-inf")', "-3.4028234663852886e38"),
    GeneratedFault(ROTATED, NATIVE, "head < a.out.heads", "head < 1"),
    GeneratedFault(ROTATED, NATIVE, "a.in_y.heads == 1 ? 0 : head", "head"),
    GeneratedFault(ROTATED, TRITON, "t.expand(*lead, t.shape[-1])", "t.expand(lead[0], 1, *lead[2:], t.shape[-1])"),
    # ── the table, the shape rule, the schema ───────────────────────────────────────────────────────────────────
    GeneratedFault(ADD_NORM, OP, "any(t.dtype != call.x.dtype for t in (call.x, call.y, call.weight))", "False"),
    GeneratedFault(ADD_NORM, OP, "if any(t.shape[-1] != width", "if False and any(t.shape[-1] != width"),
    GeneratedFault(PRODUCT, OP, "t.shape != call.x.shape or ", ""),
    GeneratedFault(PRODUCT, OP, " or t.dtype != call.x.dtype", ""),
    GeneratedFault(PRODUCT, OP, "_triton(x, y)", "_triton(y, x)"),
    GeneratedFault(WIDE, TRITON, "dtype=in_y.dtype", "dtype=in_x.dtype"),
    GeneratedFault(ADD_NORM, OP, "t.new_empty(t.shape)", "t.new_empty(t.shape[1:])"),
    GeneratedFault(ADD_NORM, OP, "for t in result)", "for t in result[:1])"),
    GeneratedFault(PRODUCT, OP, "result.new_empty(result.shape)", "result.new_empty(result.shape, dtype=float)"),
    GeneratedFault(PRODUCT, OP, "result.new_empty(result.shape)", "result.new_empty(result.shape[::-1])"),
    GeneratedFault(PRODUCT, OP, '-> Tensor"', '-> Tensor(a)"'),
    GeneratedFault(PRODUCT, OP, "(Tensor x, ", "(Tensor(a!) x, "),
    # ── the reference and the transform ─────────────────────────────────────────────────────────────────────────
    GeneratedFault(ADD_NORM, REFERENCE, "1e-06", "1e-05"),
    GeneratedFault(ADD_NORM, REFERENCE, "total = x + y", "total = x.add_(y)"),
    GeneratedFault(ADD_NORM, REFERENCE, "(total * scale)", "(total.float() * scale)"),
    GeneratedFault(ADD_NORM, ALL, "1e-06", "1e-05"),
    GeneratedFault(SOFTCAPPED, ALL, "0.125", "0.1251"),
    GeneratedFault(PRODUCT, REFERENCE, "(x: Tensor, y: Tensor)", "(y: Tensor, x: Tensor)"),
    GeneratedFault(PRODUCT, REFERENCE, "silu(x) * y", "silu(x).mul_(y) if x.shape[1] > 1 else x"),
    GeneratedFault(PRODUCT, TRANSFORM, "row_product(x, y)", "row_product(y, x)"),
    GeneratedFault(ADD_NORM, TRANSFORM, "row_add_norm(x, y, weight)", "row_add_norm(x, x, weight)"),
    # ── in a model ──────────────────────────────────────────────────────────────────────────────────────────────
    GeneratedFault(NORM, NATIVE, "1e-06f", "1e-05f"),
    GeneratedFault(NORM, ALL, "1e-06", "2e-06"),
    GeneratedFault(NORM, TRANSFORM, "1e-06", "1e-05"),
    GeneratedFault(NORM, TRANSFORM, "mean(-1, keepdim=True)", "mean(-2, keepdim=True)"),
    GeneratedFault(NORM, TRANSFORM, "(x, weight)", "(x, weight * 1.001)"),
    GeneratedFault(ROPE, NATIVE, "  share(next", "  if (a.rows == 1) return;\n  share(next"),
    GeneratedFault(ROPE, LOWERING, 'z = plan.value(given["z"])', 'z = plan.value(given["y"])'),
    GeneratedFault(ROPE, TRANSFORM, "(x, y, z)", "(x, z, y)"),
    GeneratedFault(GATE, NATIVE, "for (int64_t head = 0;", "if (row == 1) return;\n    for (int64_t head = 0;"),
    GeneratedFault(GATE, OP, "_triton(x, y)", "_triton(x, x)"),
    # ── GEMMs: tiles, tails, what is made before them and done behind them ──────────────────────────────────────
    GeneratedFault(GEMM_GATED, NATIVE, "lanes[i - first]", "lanes[0]"),
    GeneratedFault(GEMM_GATED, NATIVE, "first + kLanes, given.n", "first + kLanes, given.n - 1"),
    GeneratedFault(GEMM_GATED, NATIVE, "std::min<int64_t>(first + kLanes, given.n)", "first + kLanes", wild=True),
    GeneratedFault(GEMM_GATED, NATIVE, "a.in_bias[i]", "a.in_bias[first]"),
    GeneratedFault(GEMM_GATED, NATIVE, "a.in_y.row(row)", "a.in_y.row(0)"),
    GeneratedFault(GEMM_GATED, NATIVE, "r_out[i] = ", "r_out[i] = 1.001f * "),
    GeneratedFault(GEMM_GATED, NATIVE, "const float sums = lanes", "const float sums = row == 0 ? 0.0f : lanes"),
    GeneratedFault(GEMM_GATED, LOWERING, "k=depth", "k=depth - 1", wild=True),
    GeneratedFault(GEMM_GATED, LOWERING, "n=columns", "n=columns - 1"),
    GeneratedFault(GEMM_GATED, LOWERING, "tokens=rows", "tokens=1"),
    GeneratedFault(GEMM_GATED, LOWERING, "ldo=Stride(out)", "ldo=0", wild=True),
    GeneratedFault(GEMM_GATED, LOWERING, "ldx=Stride(in_x)", "ldx=depth", wild=True),
    GeneratedFault(GEMM_GATED, LOWERING, "x=Pointer(in_x)", "x=Pointer(in_y)", wild=True),
    GeneratedFault(GEMM_NORMED, NATIVE, " / static_cast<float>(n_c)", ""),
    GeneratedFault(GEMM_NORMED, NATIVE, "row_sum(0, n_c", "row_sum(0, n_c - 1"),
    GeneratedFault(GEMM_NORMED, NATIVE, "a.in_norm[i]", "a.in_norm[0]"),
    GeneratedFault(GEMM_NORMED, NATIVE, "a.in_x.row(row)", "a.in_x.row(0)"),
    GeneratedFault(GEMM_NORMED, NATIVE, "load(given.in.room + c, lanes)", "set(0.0f)"),
    GeneratedFault(GEMM_NORMED, NATIVE, "scratch + whole(a.k, kLanes)", "scratch", wild=True),
    GeneratedFault(GEMM_NORMED, NATIVE, "i < n_c; ++i", "i < n_c - 1; ++i"),
    GeneratedFault(GEMM_NORMED, NATIVE, "relu(", "std::fabs("),
    GeneratedFault(GEMM_RANGED, NATIVE, "row_max(0, n_c", "row_max(0, n_c / 16 * 16"),
    GeneratedFault(GEMM_GATED, TRITON, "row[:, None] * columns + i", "row[:, None] * depth + i", wild=True),
    GeneratedFault(GEMM_GATED, TRITON, "triton.cdiv(columns, BN)", "max(1, columns // BN)"),
    GeneratedFault(GEMM_GATED, TRITON, "triton.cdiv(count, rows)", "max(1, count // rows)"),
    GeneratedFault(GEMM_GATED, TRITON, "* depth + at", "* columns + at", wild=True),
    GeneratedFault(GEMM_GATED, TRITON, "(at < depth) & (column", "(at < depth - 1) & (column"),
    GeneratedFault(GEMM_GATED, TRITON, "range(0, depth, BK)", "range(0, depth // BK * BK, BK)"),
    GeneratedFault(GEMM_GATED, TRITON, "tl.dot(tile, w, acc", "tl.dot(tile, w, acc * 0.0"),
    GeneratedFault(GEMM_GATED, TRITON, ".to(weight_ptr.dtype.element_ty)", ".to(tl.bfloat16)"),
    GeneratedFault(GEMM_GATED, TRITON, "bias_ptr + i", "bias_ptr + i // 2"),
    GeneratedFault(GEMM_GATED, TRITON, "row % n1, row // n1", "row // n1, row % n1", wild=True),
    GeneratedFault(GEMM_GATED, TRITON, "i1 * y_s1", "i1 * x_s1", wild=True),
    GeneratedFault(GEMM_GATED, TRITON, "in_weight.contiguous()", "in_weight"),
    GeneratedFault(GEMM_GATED, TRITON, "for s in t.stride()", "for s in t.contiguous().stride()", wild=True),
    GeneratedFault(GEMM_GATED, TRITON, ".to(tl.int64) * BM", " * BM"),
    GeneratedFault(GEMM_GATED, TRITON, "dtype=in_weight.dtype", "dtype=torch.float32"),
    GeneratedFault(GEMM_GATED, TRITON, "lead[1], columns", "lead[0], columns", wild=True),
    GeneratedFault(GEMM_NORMED, TRITON, "s0 / depth", "s0 / columns"),
    GeneratedFault(GEMM_NORMED, TRITON, "s0 = s0 + folded", "s0 = folded"),
    GeneratedFault(GEMM_NORMED, TRITON, "norm_ptr + i", "norm_ptr + i // 2"),
    GeneratedFault(GEMM_NORMED, TRITON, "1e-06", "1e-05"),
    GeneratedFault(GEMM_RANGED, TRITON, 'float("-inf")', "0.0"),
    GeneratedFault(GEMM_RANGED, TRITON, 'float("-inf")', "-1e9"),
    GeneratedFault(GEMM_GATED, OP, "if any(t.shape[-1] != width", "if False and any(t.shape[-1] != width"),
    GeneratedFault(GEMM_GATED, OP, "if any(t.dtype", "if False and any(t.dtype"),
    GeneratedFault(GEMM_NORMED, OP, "call.weight.dim() != 2 or ", ""),
    GeneratedFault(GEMM_GATED, OP, "result.new_empty(result.shape)", "result.new_empty(result.shape[::-1])"),
    GeneratedFault(GEMM_NORMED, REFERENCE, "1e-06", "1e-05"),
    GeneratedFault(GEMM_NORMED, ALL, "1e-06", "1e-05"),
    GeneratedFault(GEMM_GATED, TRANSFORM, "row_gemm_gated(x, y,", "row_gemm_gated(x, x,"),
    GeneratedFault(GATED_GEMM, NATIVE, "lanes[i - first]", "lanes[first % kLanes]"),
    GeneratedFault(GATED_GEMM, NATIVE, "  float lanes[kLanes];", "  if (row == 1) return;\n  float lanes[kLanes];"),
    # ── merged layers: whose rows, in which order, and who may not be moved ─────────────────────────────────────
    GeneratedFault(SIBLINGS, TRANSFORM, '"v_proj"', '"o_proj"'),
    GeneratedFault(SIBLINGS, TRANSFORM, "layers = LAYERS", "layers = LAYERS[:2]"),
    GeneratedFault(SIBLINGS, TRANSFORM, "layers = LAYERS", "layers = LAYERS[::-1]"),
    GeneratedFault(SIBLINGS, TRANSFORM, "layers = LAYERS", UNCHECKED),
    GeneratedFault(SIBLINGS, TRANSFORM, "layers = LAYERS", EXCHANGED),
)
