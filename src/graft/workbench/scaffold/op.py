"""The folder of a new op: its schema, a reference that is the pattern, cases, and a Triton kernel where one can be
written from the pattern (tensors of one shape, element by element)."""

from __future__ import annotations

import re
from typing import Any

import torch

from graft.ir.nodes import calls
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
from graft.workbench.scaffold.kernel import KernelSource, kernel_of
from graft.workbench.scaffold.render import fill

aten = torch.ops.aten
MATMULS = (
    aten.linear.default,
    aten.matmul.default,
    torch.ops.graft.linear.default,
    torch.ops.graft.fused_linear.default,
)
LINE = 118  # characters
WIDTH = 1536  # of the last dim, in the case for one token


def op_files(op: str, module: str, body: Body, tried: Tried) -> tuple[dict[str, str], str]:
    """File name → text, and why there is no Triton kernel ('' where there is one)."""
    kernel = kernel_of(body, tried.rewrite)
    tensors, typed = tensor_arguments(body.pattern), typed_arguments(body.pattern)
    names = ", ".join(name for name, _ in typed)
    common = {
        "op": op,
        "op_module": module,
        "names": names,
        "call_tuple": tuple_text([f"call.{name}" for name in tensors]),
        "first": tensors[0],
        "typed": ", ".join(f"{name}: {kind}" for name, kind in typed),
        "schema": ", ".join(f"{kind} {name}" for name, kind in typed),
        "returned": returned(body.pattern),
        "results": f"({', '.join(['Tensor'] * count)})" if (count := results_of(body.pattern)) else "Tensor",
        "empty": "tuple(t.new_empty(t.shape) for t in result)" if count else "result.new_empty(result.shape)",
    }
    has = isinstance(kernel, KernelSource)
    parts = {
        "imports": op_imports(op, module, has),
        "triton_parts": "\n\n" + fill("op_triton", common).strip("\n") + "\n" if has else "",
        "kernels": '\n        kernels=(Kernel("triton", "triton", triton_problem, run_triton),),' if has else "",
    }
    files = {
        "__init__.py": "",
        "op.py": fill("op", common | parts),
        "reference.py": reference_text(op, body),
        "cases.py": cases_text(op, body, list(calls(tried.before))),
    }
    if isinstance(kernel, KernelSource):
        files["triton.py"] = triton_text(kernel, common, tensors)
        return files, ""
    return files, kernel


def op_imports(op: str, module: str, kernel: bool) -> str:
    spec = f"from graft.ops.spec import {'Kernel, OpSpec, define, needs_triton' if kernel else 'OpSpec, define'}"
    asked = ["from graft.ops.call import Call"] * kernel
    own = f"from {module}.reference import {op}"
    if module.startswith("graft."):
        return "\n".join(sorted([*asked, spec, own]))
    return "\n".join([*asked, spec, "", own])


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
    reduction = WIDTH if matmul else max(4, len(called))
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
            "letters": letters,
            "last": next((d for d in reversed(shapes[0]) if d.isalpha()), letters[-1:] or "a"),
            "reduction": str(reduction),
            "width": str(WIDTH),
        },
    )


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
        "    made = (randn(shape, device, kind, generator) * scale for shape, kind, scale in given)\n"
        f"    return (*made{literals})"
    )


def root_text(dim: str) -> str:
    return f"{dim}**-0.5" if dim.isdigit() else f"{size_text(dim)} ** -0.5"


def tuple_text(items: list[str]) -> str:
    if not items:
        return "()"
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def size_text(dim: str) -> str:
    """`d` → sizes["d"], `2` → 2, `d+6` → sizes["d"] + 6."""
    return re.sub(r"[a-z]", lambda m: f'sizes["{m[0]}"]', dim)


def triton_text(kernel: KernelSource, common: dict[str, str], tensors: list[str]) -> str:
    imported = f"\nfrom graft.ops.triton_math import {', '.join(kernel.helpers)}\n" if kernel.helpers else ""
    loads = [f"    {n} = tl.load({n}_ptr + at, mask=mask, other=0.0).to(tl.float32)" for n in tensors]
    return fill(
        "triton",
        common
        | {
            "helper_import": imported,
            "pointers": ", ".join([*(f"{name}_ptr" for name in tensors), "out", "count", *kernel.numbers]),
            "loads": "\n".join(loads),
            "steps": "\n".join(f"    {line}" for line in kernel.steps),
            "result": kernel.result,
            "given": ", ".join(
                [*(f"{name}.contiguous()" for name in tensors), "out", "out.numel()", *kernel.numbers]
            ),
        },
    )
