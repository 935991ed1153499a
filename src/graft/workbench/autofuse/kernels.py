"""A new op's native kernel by itself, as it is lowered in a decoder's graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from graft.backends.native.lower import lower_native
from graft.backends.native.program import Pointer, Program, Value
from graft.base.errors import NothingNative
from graft.ir.io.symbols import Symbol, declare, fresh_mode
from graft.ir.patterns.arguments import size_of
from graft.ops import OPS
from graft.workbench.autofuse.alone import ComparedCalls
from graft.workbench.autofuse.cases import (
    KernelCase,
    NotOneShape,
    broadcasts,
    dims,
    inputs,
    leading,
    made_of,
    matrices,
    plain_cases,
    sizes,
    widths_of,
)

BATCHES = ((1, 13), (1, 1))  # a step of the native backend holds one row of tokens


class KernelWrong(Exception):
    """What a step does beside its results."""


def native_kernel_problem(op: str, shapes: Mapping[str, str]) -> tuple[str, int]:
    """What is wrong with the native kernel of graft::`op`, '' for nothing; and how many calls were compared."""
    if not leading(shapes):
        raise NotOneShape("none of its sizes is a count of tokens")
    built: dict[Any, Callable[..., Any]] = {}
    compared = ComparedCalls(OPS[op].reference)
    try:
        for case in (*plain_cases(shapes, BATCHES, 2), *packed_cases(shapes)):
            if case.extreme and not compared.applies(case):
                continue
            problem = compared.problem(runner(op, shapes, case.tensors, built), case)
            if problem:
                return problem, compared.calls
        return compared.unseen() or broadcast_problem(op, shapes, compared), compared.calls
    except KernelWrong as wrong:
        return str(wrong), compared.calls


def packed_cases(shapes: Mapping[str, str]) -> list[KernelCase]:
    """Of a GEMM: a weight of 16 bits is packed in another form, which other tiles read."""
    given = inputs(shapes, widths_of(shapes)[1], 1.0, BATCHES[0], torch.bfloat16)
    return [KernelCase("bfloat16", given)] if matrices(shapes) else []


def broadcast_problem(op: str, shapes: Mapping[str, str], compared: ComparedCalls) -> str:
    """Inputs of one row for all: the lowering refuses them, or they are right."""
    known = sizes(shapes, widths_of(shapes)[1], BATCHES[0])
    for name, changed in broadcasts(shapes):
        case = KernelCase(name, made_of(changed, known, 1.0, torch.float32))
        if not compared.applies(case) or leading(changed) != leading(shapes):
            continue
        try:
            run = runner(op, changed, case.tensors, {})
        except (NotOneShape, NothingNative):
            continue
        if problem := compared.problem(run, case):
            return problem
    return ""


def runner(
    op: str, shapes: Mapping[str, str], args: tuple[Tensor, ...], built: dict[Any, Callable[..., Any]]
) -> Callable[[tuple[Tensor, ...]], Any]:
    """The op as a compiled step. built: those that are there; vectors and matrices are weights, packed once."""
    known = sizes_of(shapes, args)
    tokens = leading(shapes)[-1]
    ids = torch.zeros(1, known[tokens], dtype=torch.int64)
    held = [is_held(shapes, name) for name in shapes]
    packed = [tensor for tensor, own in zip(args, held, strict=True) if own]
    weights = [bytes(tensor.contiguous().flatten().view(torch.uint8).numpy()) for tensor in packed]
    key = (*(size for letter, size in known.items() if letter != tokens), *weights)
    if key not in built:
        built[key] = lowered(op, shapes, args, known)
    return lambda given: built[key](ids, *(value for value, own in zip(given, held, strict=True) if not own))


def is_held(shapes: Mapping[str, str], name: str) -> bool:
    """Whether it is a weight, which the step holds."""
    return len(dims(shapes[name])) < 2 or name in matrices(shapes)


def sizes_of(shapes: Mapping[str, str], args: tuple[Tensor, ...]) -> dict[str, int]:
    """Letter → size; sizes that follow from others have none."""
    pairs = (
        (d, n)
        for text, a in zip(shapes.values(), args, strict=True)
        for d, n in zip(dims(text), a.shape, strict=True)
    )
    return {dim: int(size) for dim, size in pairs if dim.isalpha()}


def lowered(
    op: str, shapes: Mapping[str, str], args: tuple[Tensor, ...], known: Mapping[str, int]
) -> Callable[..., Any]:
    """For any count of tokens, as a decoder's graph."""
    mode, graph, root = fresh_mode(), Graph(), torch.nn.Module()
    args = tuple(map(torch.clone, args))
    count = declare([Symbol("s0", 13, 2, None)], mode)["s0"]
    counts: dict[str, Any] = {**known, leading(shapes)[-1]: count}
    with mode:
        ids = graph.placeholder("input_ids")
        ids.meta["val"] = torch.empty(1, count, dtype=torch.int64)
        nodes, fakes = [], []
        for (name, shape), tensor in zip(shapes.items(), args, strict=True):
            if is_held(shapes, name):
                root.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
                node = graph.get_attr(name)
            else:
                node = graph.placeholder(name)
            node.meta["val"] = torch.empty([size_of(dim, counts) for dim in dims(shape)], dtype=tensor.dtype)
            nodes.append(node)
            fakes.append(node.meta["val"])
        target = getattr(torch.ops.graft, op).default
        call = graph.call_function(target, tuple(nodes))
        call.meta["val"] = target(*fakes)
        found = [call]
        if isinstance(call.meta["val"], (tuple, list)):
            found = [graph.call_function(getitem, (call, index)) for index in range(len(call.meta["val"]))]
            for item, value in zip(found, call.meta["val"], strict=True):
                item.meta["val"] = value
        count = len(found)
        for node in nodes:  # what a step reads behind it: inputs as they were
            if node.op == "placeholder":
                found.append(graph.call_function(torch.ops.aten.add.Tensor, (node, node)))
                found[-1].meta["val"] = node.meta["val"] + node.meta["val"]
        graph.output(tuple(found))
    made = lower_native(GraphModule(root, graph))
    eager = next((note for note in made.notes if f"graft.{op}" in note), "")
    if eager:
        raise NotOneShape(eager)
    for one in made.step.calls:
        check_writes(one.program)
    return partial(results_of, made.call, count)


def results_of(step: Callable[..., Any], count: int, ids: Tensor, *given: Tensor) -> list[Tensor]:
    made = list(step(ids, *given))
    for index, (twice, value) in enumerate(zip(made[count:], given, strict=True)):
        if not torch.equal(twice.nan_to_num(), (value + value).nan_to_num()):
            raise KernelWrong(f"what is read behind it is changed: its input {index}, in the arena")
    return made[:count]


def check_writes(program: Program) -> None:
    """A step that does not say what it writes is not waited for, which a single call does not show."""
    written: set[str] = set()
    for step in program.steps:
        fields = {name: field for name, field in step.fields if isinstance(field, Value)}
        told = [field for name, field in step.fields if name in step.kernel.writes]
        written |= {field.buffer for field in told if isinstance(field, Value)}
        written |= {field.value.buffer for field in told if isinstance(field, Pointer)}
        given = {
            field.value.buffer
            for _, field in step.fields
            if isinstance(field, Pointer) and isinstance(field.value, Value)
        }
        for name, field in fields.items():
            if field.buffer not in written | given:
                raise KernelWrong(f"the step of {step.node} does not say that it writes {name}")
