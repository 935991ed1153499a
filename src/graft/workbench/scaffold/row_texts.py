"""A program over rows as the files of an op: a Triton kernel, or a header for backend="native"."""

from __future__ import annotations

from collections.abc import Mapping

from graft.workbench.scaffold.kernel import CPP, GIVEN, TRITON, given_names
from graft.workbench.scaffold.render import fill
from graft.workbench.scaffold.row_program import RowBlock, RowInput, RowLanguage, RowProgram, Stretch

IDENTITY = {"sum": "0.0", "mean": "0.0", "amax": 'float("-inf")', "amin": 'float("inf")'}
TRITON_FOLD = {"sum": "tl.sum", "mean": "tl.sum", "amax": "row_max", "amin": "row_min"}
TRITON_JOIN = {"sum": "{} + {}", "mean": "{} + {}", "amax": "maximum({}, {})", "amin": "minimum({}, {})"}
CPP_FOLD = {"sum": "row_sum", "mean": "row_sum", "amax": "row_max", "amin": "row_min"}
CPP_JOIN = {"sum": "{} + {}", "mean": "{} + {}", "amax": "larger({}, {})", "amin": "smaller({}, {})"}


def triton_load(given: RowInput, at: str) -> str:
    where = f"{given.name}_ptr" if given.vector else f"r_{given.name}"
    if given.width == 1:
        return f"tl.load({where}).to(tl.float32)"
    return f"tl.load({where} + {at}, mask=mask, other=0.0).to(tl.float32)"


def cpp_load(given: RowInput, at: str) -> str:
    return f"a.in_{given.name}[{at}]" if given.vector else f"r_{given.name}[{at}]"


TRITON_ROWS = RowLanguage(TRITON, triton_load)
CPP_ROWS = RowLanguage(CPP, cpp_load)


def size(width: int | str) -> str:
    return str(width) if isinstance(width, int) else f"n_{width}"


def letters(program: RowProgram) -> dict[str, str]:
    """Each width that is known at run time only → the first input that has it."""
    found: dict[str, str] = {}
    for given in sorted(program.inputs, key=lambda one: one.vector):
        if isinstance(given.width, str):
            found.setdefault(given.width, given.name)
    return found


# ── Triton ──────────────────────────────────────────────────────────────────────────────────────────────────────


def triton_rows_text(program: RowProgram, common: Mapping[str, str]) -> str:
    rows = [given.name for given in program.inputs if not given.vector]
    vectors = [given.name for given in program.inputs if given.vector]
    known = letters(program)
    helpers = triton_helpers(program)
    strides = [f"{name}_s{dim}" for name in rows for dim in range(3)]
    outs = [output.name for output in program.outputs]
    sizes = [f"n_{letter}" for letter in known]
    pointers = [*(f"{n}_ptr" for n in (*rows, *vectors)), *(f"{n}_ptr" for n in outs), "n1", "n2"]
    blocks = "".join(triton_block(block) for block in program.blocks)
    first = GIVEN.format(common["first"])
    typed = next((GIVEN.format(given.name) for given in program.inputs if not given.wide), first)  # the model's dtype
    return fill(
        "triton_rows",
        {
            **common,
            "helper_import": f"\nfrom graft.ops.triton_math import {', '.join(helpers)}\n" if helpers else "",
            "parameters": ", ".join([*pointers, *strides, *sizes, *given_names(program.numbers)]),
            "starts": "".join(
                f"    r_{name} = {name}_ptr + i0 * {name}_s0 + i1 * {name}_s1 + i2 * {name}_s2\n" for name in rows
            )
            + "".join(f"    r_{o.name} = {o.name}_ptr + row * {size(o.width)}\n" for o in program.outputs),
            "blocks": blocks.rstrip("\n"),
            "rows": "".join(f"{name}, " for name in given_names(rows)),
            "widest": ", ".join(dict.fromkeys(size(given.width) for given in program.inputs)),
            "measured": "".join(f"    n_{letter} = in_{name}.shape[-1]\n" for letter, name in known.items()),
            "vectors": "".join(f"{name}.contiguous(), " for name in given_names(vectors)),
            "made": "".join(
                f"    {o.name} = torch.empty((*lead, {size(o.width)}), device={first}.device,"
                f" dtype={'torch.float32' if o.wide else typed + '.dtype'})\n"
                for o in program.outputs
            ),
            "outs": "".join(f"{name}, " for name in outs),
            "trailing": "".join(f", {name}" for name in (*sizes, *given_names(program.numbers))),
            "result": ", ".join(outs),
        },
    )  # fmt: skip


def triton_helpers(program: RowProgram) -> list[str]:
    found = set(program.helpers)
    for block in program.blocks:
        if block.kind in ("amax", "amin") and block.width != 1:
            found.add(TRITON_FOLD[block.kind])
            found |= {TRITON_JOIN[block.kind].partition("(")[0]} if len(block.stretches) > 1 else set()
    return sorted(found)


def triton_block(block: RowBlock) -> str:
    lines: list[str] = []
    for number, stretch in enumerate(block.stretches):
        if block.width != 1:
            lines += [f"i = {stretch.first} + tl.arange(0, BLOCK)" if stretch.first else "i = tl.arange(0, BLOCK)"]
            lines += [f"mask = i < {size(stretch.last)}"]
        lines += [*(f"{name} = {text}" for name, text in stretch.lines), *triton_end(block, stretch, number)]
    if block.kind == "mean" and block.width != 1:
        lines.append(f"{block.names[0]} = {block.names[0]} / {size(block.width)}")
    return "".join(f"    {line}\n" for line in lines)


def triton_end(block: RowBlock, stretch: Stretch, number: int) -> list[str]:
    name = block.names[0]
    if block.kind == "scalar":
        return [f"{name} = {stretch.results[0]}"]
    if block.kind == "store":
        at, mask = ("", "") if block.width == 1 else (" + i", ", mask=mask")
        return [
            f"tl.store(r_{out}{at}, {value}.to({out}_ptr.dtype.element_ty){mask})"
            for out, value in zip(block.names, stretch.results, strict=True)
        ]
    if block.width == 1:
        return [f"{name} = {stretch.results[0]}"]
    folded = f"{TRITON_FOLD[block.kind]}(tl.where(mask, {stretch.results[0]}, {IDENTITY[block.kind]}), 0)"
    return [f"{name} = {TRITON_JOIN[block.kind].format(name, folded) if number else folded}"]


# ── C++ ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def native_rows_files(program: RowProgram, common: Mapping[str, str], struct: str) -> dict[str, str]:
    rows = [given for given in program.inputs if not given.vector]
    vectors = [given.name for given in program.inputs if given.vector]
    outs = [output.name for output in program.outputs]
    members = [f"View in_{given.name};" for given in rows] + [f"const float* in_{name};" for name in vectors]
    members += (
        [f"float in_{name};" for name in program.numbers] + ["int64_t rows;"] + [f"View {name};" for name in outs]
    )
    of_head = "a.{0}.at(row, a.{0}.heads == 1 ? 0 : head)"
    starts = [f"const float* r_{given.name} = {of_head.format(GIVEN.format(given.name))};" for given in rows]
    starts += [f"float* __restrict r_{name} = a.{name}.at(row, head);" for name in outs]
    starts += [f"const int64_t n_{letter} = a.in_{name}.size;" for letter, name in letters(program).items()]
    body = [*starts, *(line for block in program.blocks for line in cpp_block(block))]
    known = letters(program)
    values = {
        **common,
        "struct": f"{struct}Args",
        "members": " ".join(members),
        "scalars": "".join(f"  const float v_{name} = a.in_{name};\n" for name in program.numbers),
        "first_out": outs[0],
        "body": "".join(f"      {line}\n" for line in body),
        "values": "".join(f'    in_{given.name} = plan.value(given["{given.name}"])\n' for given in rows)
        + "".join(f'    in_{name} = plan.vector(given["{name}"])\n' for name in vectors)
        + "".join(f'    in_{name} = float(given["{name}"])\n' for name in program.numbers),
        "widths": "".join(f"    n_{letter} = in_{name}.layout.size\n" for letter, name in known.items()),
        "rows": ", ".join(f"(in_{given.name}, {size(given.width)})" for given in rows) + ",",
        "vector_check": "".join(
            f'    if tensor_of(given["{given.name}"]).shape[-1] != {size(given.width)}:\n'
            f'        raise NotLowered("{given.name} is not as wide as the rows")\n'
            for given in program.inputs
            if given.vector and given.width != 1
        ),
        "outputs": ", ".join(outs),
        "sizes": "".join(f"({output.name}, {size(output.width)}), " for output in program.outputs),
        "made": native_outputs(outs),
        "writes": ", ".join(f'"{name}"' for name in outs) + ",",
        "fields": ", ".join(
            f"{n}={n}" for n in (*given_names((*(g.name for g in rows), *vectors, *program.numbers)), *outs)
        ),
        "bound": outs[0] if len(outs) == 1 else f"({', '.join(outs)})",
        "tensor_import": ", tensor_of" if any(g.vector and g.width != 1 for g in program.inputs) else "",
    }  # fmt: skip
    return {"native.h": fill("native_rows_header", values), "native.py": fill("native_rows", values)}


def native_outputs(outs: list[str]) -> str:
    if len(outs) == 1:
        return f"    {outs[0]} = plan.new(node)\n"
    made = "".join(
        f'    {name} = plan.new(node, plan.shapes.layout(node.meta["val"][{i}]), "_{i}")\n'
        for i, name in enumerate(outs)
    )
    return made


def cpp_block(block: RowBlock) -> list[str]:
    name, lines = block.names[0], []
    if block.kind == "scalar":
        (stretch,) = block.stretches
        if not stretch.lines:  # a cast of another one
            return [f"const float {name} = {stretch.results[0]};"]
        if stretch.lines == ((stretch.results[0], stretch.lines[0][1]),):
            return [f"const float {name} = {stretch.lines[0][1]};"]
        return [f"const float {name} = [&] {{ {inline(stretch)} }}();"]
    if block.kind == "store":
        for stretch in block.stretches:
            stores = [f"r_{out}[i] = {value};" for out, value in zip(block.names, stretch.results, strict=True)]
            lines += [f"for (int64_t i = {stretch.first}; i < {size(stretch.last)}; ++i) {{"]
            steps = [f"const float {named} = {text};" for named, text in stretch.lines]
            lines += [*(f"  {line}" for line in (*steps, *stores)), "}"]
        return lines
    folded = ""
    for stretch in block.stretches:
        one = f"{CPP_FOLD[block.kind]}({stretch.first}, {size(stretch.last)}, [&](int64_t i) {{ {inline(stretch)} }})"
        folded = CPP_JOIN[block.kind].format(folded, one) if folded else one
    share = f" / static_cast<float>({size(block.width)})" if block.kind == "mean" else ""
    return [f"const float {name} = ({folded}){share};"]


def inline(stretch: Stretch) -> str:
    """The lines of a stretch as the body of a function."""
    steps = "".join(f"const float {name} = {text}; " for name, text in stretch.lines)
    return f"{steps}return {stretch.results[0]};"
