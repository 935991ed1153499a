"""A GEMM with its prologue and its epilogue as the files of an op: a Triton kernel, or a header for backend="native"
whose tiles are those of graft::fused_linear."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from graft.workbench.scaffold.gemm_program import ROW, SUMS, GemmProgram
from graft.workbench.scaffold.kernel import CPP, GIVEN, TRITON, given_names
from graft.workbench.scaffold.render import fill
from graft.workbench.scaffold.row_program import RowBlock, RowInput, RowLanguage, output_name
from graft.workbench.scaffold.row_texts import (
    IDENTITY,
    TRITON_FOLD,
    TRITON_JOIN,
    cpp_block,
    cpp_load,
)


def triton_load(given: RowInput, at: str) -> str:
    """From a tile: `i` is a row of columns, `r_x` the beginnings of its rows."""
    if given.name == SUMS:
        return "acc"
    if given.vector and given.width == 1:
        return f"tl.load({given.name}_ptr).to(tl.float32)"
    if given.vector:
        return f"tl.load({given.name}_ptr + {at}, mask=inside, other=0.0).to(tl.float32)"
    if given.width == 1:
        return f"tl.load(r_{given.name}, mask=known, other=0.0).to(tl.float32)[:, None]"
    return f"tl.load(r_{given.name}[:, None] + {at}, mask=mask, other=0.0).to(tl.float32)"


def cpp_tile_load(given: RowInput, at: str) -> str:
    return "sums" if given.name == SUMS else cpp_load(given, at)


TRITON_TILES = RowLanguage(TRITON, triton_load)
CPP_TILES = RowLanguage(CPP, cpp_tile_load)


def depth_and_width(program: GemmProgram) -> dict[int | str, str]:
    """Sizes that follow from the weight, and what they are called."""
    return {program.width: "columns", program.depth: "depth"}


def as_text(program: GemmProgram, width: int | str) -> str:
    return depth_and_width(program).get(width, str(width))


def rows_of(program: GemmProgram) -> list[RowInput]:
    return [given for given in program.inputs if not given.vector]


def out_of(program: GemmProgram) -> str:
    return output_name([*(given.name for given in program.inputs), program.weight, *program.numbers])


def vectors_of(program: GemmProgram) -> list[str]:
    return [given.name for given in program.inputs if given.vector]


# ── Triton ──────────────────────────────────────────────────────────────────────────────────────────────────────


def triton_gemm_text(program: GemmProgram, common: Mapping[str, str]) -> str:
    rows, vectors = [given.name for given in rows_of(program)], vectors_of(program)
    strides = [f"{name}_s{dim}" for name in rows for dim in range(2)]
    out = out_of(program)
    pointers = [*(f"{name}_ptr" for name in (*rows, program.weight, *vectors, out)), "count", "n1"]
    helpers = triton_helpers(program)
    lines, value = triton_row(program)
    return fill(
        "triton_gemm",
        {
            **common,
            "helper_import": f"\nfrom graft.ops.triton_math import {', '.join(helpers)}\n" if helpers else "",
            "parameters": ",\n    ".join(
                [", ".join(pointers), ", ".join(["columns", "depth", *strides, *given_names(program.numbers)])]
            ),
            "starts": "".join(f"    r_{n} = {n}_ptr + i0 * {n}_s0 + i1 * {n}_s1\n" for n in rows),
            "prologue": "".join(
                own_names(text, f"p{number}_")
                for number, block in enumerate(program.prologue)
                if block.kind != "store"
                for text in triton_block(program, block)
            ),
            "made": "".join(f"        {line}\n" for line in lines),
            "value": value,
            "weight": program.weight,
            "matrix": GIVEN.format(program.weight),
            "target": out,
            "epilogue": "".join(f"    {name} = {text}\n" for name, text in program.epilogue.lines),
            "result": program.epilogue.results[0],
            "rows": "".join(f"{name}, " for name in given_names(rows)),
            "vectors": "".join(f"{name}.contiguous(), " for name in given_names(vectors)),
            "trailing": "".join(f", {name}" for name in given_names(program.numbers)),
            "dtype": "torch.float32" if program.wide else f"{GIVEN.format(program.weight)}.dtype",
        },
    )  # fmt: skip


def own_names(text: str, prefix: str) -> str:
    """Names that no other block has: Triton refuses a name that is a number a row before a loop and a tile in it."""
    return re.sub(r"\bt(\d+)\b", rf"{prefix}\1", text)


def triton_row(program: GemmProgram) -> tuple[list[str], str]:
    """How a tile of what is multiplied is made: lines, and its name."""
    if not program.prologue:
        return [], triton_load(program.before[0], "i")
    (stretch,) = program.prologue[-1].stretches
    return [own_names(f"{name} = {text}", "x") for name, text in stretch.lines], own_names(stretch.results[0], "x")


def triton_block(program: GemmProgram, block: RowBlock) -> list[str]:
    """A number for each row: of numbers that it has one of, or by a loop over its columns."""
    ((name,), (stretch,)) = block.names, block.stretches
    if block.kind == "scalar":
        return [f"    {to} = {text}\n" for to, text in (*stretch.lines, (name, stretch.results[0]))]
    columns, start = as_text(program, block.width), IDENTITY[block.kind]
    join = TRITON_JOIN[block.kind].format(name, "folded")
    lines = [
        f"    {name} = tl.full([BM, 1], {start}, tl.float32)",
        f"    for start in range(0, {columns}, BK):",
        "        i = (start + tl.arange(0, BK))[None, :]",
        f"        inside = i < {columns}",
        "        mask = known[:, None] & inside",
        *(f"        {to} = {text}" for to, text in stretch.lines),
        f"        folded = {TRITON_FOLD[block.kind]}(tl.where(mask, {stretch.results[0]}, {start}), 1)[:, None]",
        f"        {name} = {join}",
        *([f"    {name} = {name} / {columns}"] if block.kind == "mean" else []),
    ]
    return [f"{line}\n" for line in lines]


def triton_helpers(program: GemmProgram) -> list[str]:
    found = set(program.helpers)
    for block in program.prologue:
        if block.kind in ("amax", "amin"):
            found |= {TRITON_FOLD[block.kind], TRITON_JOIN[block.kind].partition("(")[0]}
    return sorted(found)


# ── C++ ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def native_gemm_files(program: GemmProgram, common: Mapping[str, str], struct: str) -> dict[str, str]:
    rows, vectors = rows_of(program), vectors_of(program)
    members = [f"View in_{given.name};" for given in rows] + [f"const float* in_{name};" for name in vectors]
    members += [f"float in_{name};" for name in program.numbers] + ["float* room;"] * bool(program.prologue)
    lines = [f"const float {name} = {text};" for name, text in program.epilogue.lines]
    multiplied = GIVEN.format(program.before[0].name)
    values = {
        **common,
        "struct": f"{struct}Args",
        "members": " ".join(members),
        "prologue": native_prologue(program, common, struct) if program.prologue else "",
        "step": OWN_ROOM.format(f"{struct}Args") if program.prologue else NO_ROOM,
        "starts": "".join(f"  {line}\n" for line in (*scalars(program), *starts(program.behind))),
        "lines": "".join(f"    {line}\n" for line in lines),
        "result": program.epilogue.results[0],
        "target": out_of(program),
        "weight": program.weight,
        "values": "".join(f'    in_{given.name} = plan.flat(given["{given.name}"])\n' for given in rows)
        + "".join(f'    in_{name} = plan.vector(given["{name}"])\n' for name in vectors)
        + "".join(f'    in_{name} = float(given["{name}"])\n' for name in program.numbers),
        "widths": "".join(f"(in_{given.name}, {as_text(program, given.width)}), " for given in rows).rstrip(" "),
        "checks": native_checks(program),
        "room": " + whole({depth}, kLanes)" if program.prologue else "",
        "multiplied": "" if program.prologue else f"x=Pointer({multiplied}), ldx=Stride({multiplied}), ",
        "fields": "".join(
            f"in__{name}={name}, " for name in given_names((*(g.name for g in rows), *vectors, *program.numbers))
        ),
    }
    return {"native.h": fill("native_gemm_header", values), "native.py": fill("native_gemm", values)}


NO_ROOM = "  linear<W>(team, thread, next, given, scratch);"
OWN_ROOM = """  {} a = given;
  a.in.room = scratch;
  linear<W>(team, thread, next, a, scratch + whole(a.k, kLanes));"""


def scalars(program: GemmProgram) -> list[str]:
    return [f"const float v_{name} = a.in_{name};" for name in program.numbers]


def starts(inputs: Iterable[RowInput]) -> list[str]:
    return [f"const float* r_{given.name} = a.in_{given.name}.row(row);" for given in inputs if not given.vector]


def native_prologue(program: GemmProgram, common: Mapping[str, str], struct: str) -> str:
    """How every thread makes the rows that it multiplies."""
    of_letter = {g.width: g.name for g in program.before if not g.vector and isinstance(g.width, str)}
    widths = [f"const int64_t n_{letter} = a.in_{name}.size;" for letter, name in of_letter.items()]
    blocks = [line for block in program.prologue for line in cpp_block(block)]
    body = [*scalars(program), *starts(program.before), *widths, *blocks]
    values = {"struct": f"{struct}Args", "row": ROW, "body": "".join(f"  {line}\n" for line in body)}
    return fill("native_gemm_row", {**common, **values})


def native_checks(program: GemmProgram) -> str:
    """What the weight and the vectors must be, beside what the rows are asked."""
    sizes = (("depth", program.depth), ("columns", program.width))
    problems = [f"{name} != {width}" for name, width in sizes if isinstance(width, int)]
    problems += ["columns != depth"] if program.depth == program.width else []
    problems += [
        f'tensor_of(given["{given.name}"]).shape[-1] != {as_text(program, given.width)}'
        for given in program.inputs
        if given.vector and given.width != 1
    ]
    return "".join(
        f'    if {problem}:\n        raise NotLowered("its weights are not as wide as the pattern\'s")\n'
        for problem in problems
    )
