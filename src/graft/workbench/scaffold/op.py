"""The folder of a new op: its schema, a reference that is the pattern, cases, and kernels in Triton and C++ where
they can be written from the pattern: element by element (kernel.py), else row by row (row_program.py), else around a
GEMM (gemm_program.py)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graft.ir.nodes import calls
from graft.passes.patterns import Rewrite
from graft.workbench.scaffold.body import (
    Body,
    Tried,
    function_name,
    literals_of,
    results_of,
    returned,
    tensor_arguments,
    typed_arguments,
)
from graft.workbench.scaffold.gemm_program import GemmProgram, gemm_program
from graft.workbench.scaffold.gemm_texts import (
    CPP_TILES,
    TRITON_TILES,
    as_text,
    native_gemm_files,
    triton_gemm_text,
)
from graft.workbench.scaffold.kernel import CPP, GIVEN, TRITON, KernelLanguage, KernelSource, given_names, kernel_of
from graft.workbench.scaffold.names import class_name
from graft.workbench.scaffold.render import fill
from graft.workbench.scaffold.row_program import REDUCTIONS, RowInput, RowLanguage, RowProgram, row_program
from graft.workbench.scaffold.row_texts import (
    CPP_ROWS,
    TRITON_ROWS,
    letters,
    native_rows_files,
    size,
    triton_rows_text,
)

aten = torch.ops.aten
MATMULS = (
    aten.linear.default,
    aten.matmul.default,
    torch.ops.graft.linear.default,
    torch.ops.graft.fused_linear.default,
)
LINE = 118  # characters
MOST_COLUMNS = 16384  # of a row that one program of Triton holds
WIDTH = 1536  # of the last dim, in the case for one token


def op_files(op: str, module: str, body: Body, tried: Tried) -> tuple[dict[str, str], str]:
    """File name → text, and why there is no Triton kernel ('' where there is one)."""
    called = list(calls(tried.before))
    gemm = any(node.target in MATMULS for node in called)
    kernel = generated(body, tried.rewrite, TRITON_KERNELS, gemm=gemm)
    tensors, typed = tensor_arguments(body.pattern), typed_arguments(body.pattern)
    names = ", ".join(name for name, _ in typed)
    common = {
        "op": op,
        "op_module": module,
        "names": names,
        "call_tuple": tuple_text([f"call.{name}" for name in tensors]),
        "first": tensors[0],
        "typed": ", ".join(f"{name}: {kind}" for name, kind in typed),
        "typed_in": ", ".join(f"{GIVEN.format(name)}: {kind}" for name, kind in typed),
        "schema": ", ".join(f"{kind} {name}" for name, kind in typed),
        "returned": returned(body.pattern),
        "results": f"({', '.join(['Tensor'] * count)})" if (count := results_of(body.pattern)) else "Tensor",
        "empty": "tuple(t.new_empty(t.shape) for t in result)" if count else "result.new_empty(result.shape)",
    }
    has = not isinstance(kernel, str)
    native = (
        "of the checkout" if module.startswith("graft.") else generated(body, tried.rewrite, CPP_KERNELS, gemm=gemm)
    )
    has_native = not isinstance(native, str)
    table = ['Kernel("triton", "triton", triton_problem, run_triton)'] * has
    table += ["native_kernel()"] * has_native
    parts = {
        "imports": op_imports(op, module, has, has_native),
        "define": "define" if module.startswith("graft.") else "define_op",
        "torch_import": "import torch\n"
        if isinstance(kernel, (RowProgram, GemmProgram)) and any(g.wide for g in kernel.inputs)
        else "",
        "triton_parts": "" if isinstance(kernel, str) else f"\n\n{run_parts(kernel, common)}\n",
        "kernels": f"\n        kernels={tuple_text(table)}," if table else "",
    }
    files = {
        "__init__.py": "",
        "op.py": fill("op", common | parts),
        "reference.py": reference_text(op, body),
        "cases.py": cases_text(op, body, called),
    }
    if isinstance(native, KernelSource):
        files |= native_files(native, common, tensors, class_name(op))
    elif isinstance(native, RowProgram):
        files |= native_rows_files(native, common, class_name(op))
    elif isinstance(native, GemmProgram):
        files |= native_gemm_files(native, common, class_name(op))
    if isinstance(kernel, str):
        return files, kernel
    if isinstance(kernel, KernelSource):
        files["triton.py"] = triton_text(kernel, common, tensors)
    else:
        write = triton_gemm_text if isinstance(kernel, GemmProgram) else triton_rows_text
        files["triton.py"] = write(kernel, common)  # pyrefly: ignore
    return files, ""


@dataclass(frozen=True)
class KernelLanguages:
    """One language, as each of the three ways to write a kernel uses it."""

    elements: KernelLanguage
    rows: RowLanguage
    tiles: RowLanguage


TRITON_KERNELS = KernelLanguages(TRITON, TRITON_ROWS, TRITON_TILES)
CPP_KERNELS = KernelLanguages(CPP, CPP_ROWS, CPP_TILES)


def generated(
    body: Body, rewrite: Rewrite, language: KernelLanguages, *, gemm: bool
) -> KernelSource | RowProgram | GemmProgram | str:
    """Around its GEMM where there is one; else element by element where that will do, else row by row; or why none
    can be written."""
    if gemm:
        return gemm_program(body, rewrite, language.tiles)
    found = kernel_of(body, rewrite, language.elements)
    return row_program(body, rewrite, language.rows) if isinstance(found, str) else found


def run_parts(kernel: KernelSource | RowProgram | GemmProgram, common: dict[str, str]) -> str:
    """When the Triton kernel can run, and how."""
    if isinstance(kernel, KernelSource):
        return fill("op_triton", common).strip("\n")
    if isinstance(kernel, GemmProgram):
        return gemm_parts(kernel, common)
    known = {f"n_{letter}": f"call.{name}.shape[-1]" for letter, name in letters(kernel).items()}
    inputs = [given for given in kernel.inputs if not given.vector or given.width != 1]
    widths = [known.get(size(given.width), size(given.width)) for given in inputs]
    values = {
        "row_tuple": tuple_text([f"call.{given.name}" for given in inputs]),
        "width_tuple": tuple_text(widths),
        "most": str(MOST_COLUMNS),
        "mixed": mixed_text(kernel.inputs),
    }
    return fill("op_triton_rows", common | values).strip("\n")


def gemm_parts(program: GemmProgram, common: dict[str, str]) -> str:
    given = [one for one in program.inputs if not one.vector or one.width != 1]
    sizes = [(name, size) for name, size in (("depth", program.depth), ("columns", program.width))]
    fixed = "".join(f" or {name} != {size}" for name, size in sizes if isinstance(size, int))
    values = {
        "weight": program.weight,
        "multiplied": next(one.name for one in program.before if not one.vector),
        "wide_tuple": tuple_text([f"call.{one.name}" for one in given]),
        "width_tuple": tuple_text([as_text(program, one.width) for one in given]),
        "fixed": f"{fixed} or columns != depth" if program.depth == program.width else fixed,
        "mixed": mixed_text(program.inputs, (program.weight,)),
    }
    return fill("op_triton_gemm", common | values).strip("\n")


def mixed_text(inputs: Sequence[RowInput], weights: Sequence[str] = ()) -> str:
    """The condition that inputs do not have the dtypes of the pattern: one for all but those declared float32."""
    wide = [f"call.{given.name}" for given in inputs if given.wide]
    rest = [f"call.{name}" for name in (*(given.name for given in inputs if not given.wide), *weights)]
    parts = [f"any(t.dtype != {rest[0]}.dtype for t in {tuple_text(rest)})"] if rest else []
    parts += [f"any(t.dtype != torch.float32 for t in {tuple_text(wide)})"] if wide else []
    return " or ".join(parts)


def op_imports(op: str, module: str, kernel: bool, native: bool) -> str:
    own = f"from {module}.reference import {op}"
    if not module.startswith("graft."):
        names = ["Call", "Kernel"] * kernel + ["OpSpec", "define_op"]
        names += ["native_kernel"] * native + ["needs_triton"] * kernel
        return f"from graft import {', '.join(names)}\n\n{own}"
    spec = f"from graft.ops.spec import {'Kernel, OpSpec, define, needs_triton' if kernel else 'OpSpec, define'}"
    return "\n".join(sorted([*["from graft.ops.call import Call"] * kernel, spec, own]))


def reference_text(op: str, body: Body) -> str:
    source = re.sub(rf"^def {function_name(body.pattern)}\b", f"def {op}", body.pattern)
    return fill("reference", {"op": op, "reference": source, "imports": import_block(body.imports, source)})


def import_block(imports: tuple[str, ...], *sources: str) -> str:
    """Those of `imports` that the sources use, in the usual order."""
    text = "\n".join(sources)
    used = [line for line in dict.fromkeys(imports) if re.search(rf"\b{line.split()[-1].split('.')[0]}\b", text)]
    plain = sorted(line for line in used if line.startswith("import"))
    return "\n".join([*plain, *sorted(line for line in used if not line.startswith("import"))])


def cases_text(op: str, body: Body, called: list[Any]) -> str:
    matmul = any(node.target in MATMULS for node in called)
    sums = any(node.target in REDUCTIONS for node in called)  # as long as a row
    reduction = WIDTH if matmul or sums else max(4, len(called))
    letters = "".join(sorted({c for shape in body.shapes.values() for c in shape.partition(":")[0] if c.isalpha()}))
    shapes = [body.shapes[name].partition(":")[0].split() for name in tensor_arguments(body.pattern)]
    each = [tuple_text([size_text(dim) for dim in shape]) for shape in shapes]
    tuples = tuple_text(each)
    if len(tuples) > LINE - len("    shapes = "):
        tuples = "(\n" + "".join(f"        {one},\n" for one in each) + "    )"
    literals = "".join(f", {value}" for value in literals_of(body.pattern).values()) or ","
    return fill(
        "cases",
        {
            "op": op,
            "shape_tuples": tuples,
            "made": made_text(body, literals, matmul),
            "decode": sizes_text(shapes[0], letters, 1, 16, WIDTH),
            "prompt": sizes_text(shapes[0], letters, 3, 3, 77),
            "reduction": str(reduction),
            "wrong": wrong_text(body),
        },
    )


def sizes_text(first: list[str], letters: str, tokens: int, others: int, width: int) -> str:
    """A size for each letter: the first tensor's last dim is the width, those before it are tokens."""
    if not first[-1].isalpha():  # the width is a number: every letter counts tokens
        return f'dict.fromkeys("{letters}", {tokens})'
    last = first[-1]
    leading = "".join(letter for letter in letters if letter in "".join(first) and letter != last)
    rest = "".join(letter for letter in letters if letter not in leading and letter != last)
    if tokens == others:
        leading, rest = "".join(sorted(leading + rest)), ""
    parts = [f'dict.fromkeys("{some}", {size})' for some, size in ((leading, tokens), (rest, others)) if some]
    return " | ".join([*parts, f'{{"{last}": {width}}}'])


def made_text(body: Body, literals: str, matmul: bool) -> str:
    """The tensors of a case. One whose dtype is named beside its shape has that one; the weight of a product is
    small, as in real models, so that results are around 1."""
    tensors = tensor_arguments(body.pattern)
    dtypes = [body.shapes[name].partition(":")[2].strip() for name in tensors]
    dims = [body.shapes[name].partition(":")[0].split() for name in tensors]
    small = [matmul and name.startswith("weight") and len(d) == 2 for name, d in zip(tensors, dims, strict=True)]
    if not any(dtypes) and not any(small):
        return f"    return (*(randn(shape, device, dtype, generator) for shape in shapes){literals})"
    kinds = tuple_text([f"torch.{name}" if name else "dtype" for name in dtypes])
    scales = tuple_text([root_text(d[-1]) if few else "1.0" for d, few in zip(dims, small, strict=True)])
    return (
        f"    kinds = {kinds}\n"
        f"    scales = {scales}\n"
        "    given = zip(shapes, kinds, scales, strict=True)\n"
        f"{WHOLE if any(map(is_whole, dtypes)) else FLOATS}"
        f"    return (*made{literals})"
    )


FLOATS = "    made = (randn(shape, device, kind, generator) * scale for shape, kind, scale in given)\n"
WHOLE = """    below = min(sizes.values())  # whole numbers may be indices
    made = (
        randn(shape, device, kind, generator) * scale
        if kind.is_floating_point
        else torch.randint(0, below, shape, generator=generator).to(device, kind)
        for shape, kind, scale in given
    )
"""


def wrong_text(body: Body) -> str:
    """Arguments with another first tensor, of floats where there is one."""
    tensors = tensor_arguments(body.pattern)
    dtypes = [body.shapes[name].partition(":")[2].strip() for name in tensors]
    chosen = next((name for name, dtype in zip(tensors, dtypes, strict=True) if not is_whole(dtype)), tensors[0])
    at = [name for name, _ in typed_arguments(body.pattern)].index(chosen)
    before = f"*args[:{at}], " if at else ""
    return f"({before}args[{at}].roll(1) * 1.25 + 0.25, *args[{at + 1}:])"


def is_whole(dtype: str) -> bool:
    """Whether tensors of it hold whole numbers, which may be indices."""
    return bool(dtype) and not getattr(torch, dtype).is_floating_point


def root_text(dim: str) -> str:
    return f"{dim}**-0.5" if dim.isdigit() else f"{size_text(dim)} ** -0.5"


def tuple_text(items: list[str]) -> str:
    if not items:
        return "()"
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def size_text(dim: str) -> str:
    """`d` → sizes["d"], `2` → 2, `d+6` → sizes["d"] + 6."""
    return re.sub(r"[a-z]", lambda m: f'sizes["{m[0]}"]', dim)


def native_files(kernel: KernelSource, common: dict[str, str], tensors: list[str], struct: str) -> dict[str, str]:
    """A header for the compiled step of backend="native", and how a call of the op becomes one of its kernel."""
    values = common | {
        "struct": f"{struct}Args",
        "members": " ".join([*(f"View in_{n};" for n in tensors), *(f"float in_{n};" for n in kernel.numbers)]),
        "scalars": "".join(f"  const float v_{name} = a.in_{name};\n" for name in kernel.numbers),
        "rows": "".join(f"      const float* r_{name} = a.in_{name}.at(row, head);\n" for name in tensors),
        "loads": "".join(f"        const float v_{name} = r_{name}[i];\n" for name in tensors),
        "steps": "".join(f"        const float {line};\n" for line in kernel.steps),
        "result": kernel.result,
        "values": "".join(f'    in_{name} = plan.value(given["{name}"])\n' for name in tensors)
        + "".join(f'    in_{name} = float(given["{name}"])\n' for name in kernel.numbers),
        "tensors": tuple_text(given_names(tensors)),
        "fields": ", ".join(f"{name}={name}" for name in given_names((*tensors, *kernel.numbers))),
    }
    return {"native.h": fill("native_header", values), "native.py": fill("native", values)}


def triton_text(kernel: KernelSource, common: dict[str, str], tensors: list[str]) -> str:
    imported = f"\nfrom graft.ops.triton_math import {', '.join(kernel.helpers)}\n" if kernel.helpers else ""
    loads = [f"    in_{n} = tl.load({n}_ptr + at, mask=mask, other=0.0).to(tl.float32)" for n in tensors]
    return fill(
        "triton",
        common
        | {
            "helper_import": imported,
            "pointers": ", ".join(
                [*(f"{name}_ptr" for name in tensors), "out", "count", *given_names(kernel.numbers)]
            ),
            "loads": "\n".join(loads),
            "steps": "\n".join(f"    {line}" for line in kernel.steps),
            "result": kernel.result,
            "given": ", ".join(
                [
                    *(f"{name}.contiguous()" for name in given_names(tensors)),
                    "out",
                    "out.numel()",
                    *given_names(kernel.numbers),
                ]
            ),
        },
    )
