"""A graph of torch.compile(backend="graft") that torch saves with the function it belongs to.

    compiled = torch.compile(f, fullgraph=True, backend="graft").aot_compile(((x,), {}))
    compiled.save_compiled_function("f.bin")
    with open("f.bin", "rb") as file:                    # another process: neither Dynamo nor graft's passes run
        again = torch.compiler.load_compiled_function(file)

torch checks the guards of a loaded function, and raises where one fails. What it does not see is looked at here: the
ops that the code calls must be those that it was compiled for, and inputs that are written may share memory with no
other. It saves no guards on globals either; `portable_guards` tells which.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph

import graft.ops  # noqa: F401  registers graft's ops, which the code calls
from graft.api.checks import check_memory
from graft.backends.inductor_saved import (
    can_be_saved,
    compiles_ahead,
    from_bytes,
    guard_can_be_saved,
    saved_by_torch,
    to_bytes,
)
from graft.base.errors import ArtifactError, GraphRefused, UsageError
from graft.ir.branches import all_nodes
from graft.ir.effects import mutated_roots
from graft.ir.nodes import OpOverload, placeholders
from graft.passes.registry import load_all
from graft.passes.report import Report

Compiled = Callable[..., Any]
WHAT = "saved function"
GLOBALS_NOTE = (
    "compiled to be saved: torch leaves out the guards on globals, so a loaded function keeps the values that they"
    " had; options={'guard_filter_fn': graft.portable_guards} names those that it read"
)
TORCH_NAMESPACES = frozenset({"aten", "prims", "prim", "higher_order", "inductor", "_c10d_functional"})
LOCAL = re.compile(r"L\['(\w+)'\]")  # Dynamo's name for a local of the program
VALUE_GUARDS = frozenset({"EQUALS_MATCH", "NONE_MATCH", "BOOL_MATCH"})
loaded_reports: list[Report] = []  # of functions that this process has loaded, in order


@dataclass(frozen=True)
class SavedHeader:
    """Beside the code. ops: name → schema of those that torch does not bring. written: numbers of inputs."""

    torch: str  # version
    report: str
    ops: dict[str, str]
    inputs: tuple[str, ...]
    written: tuple[int, ...]


@saved_by_torch
class SavedFunction:
    """A compiled graph and what a loaded one is held against."""

    def __init__(self, compiled: Compiled, header: SavedHeader) -> None:
        self.compiled, self.header = compiled, header

    def __call__(self, *args: Any) -> Any:
        if self.header.written:
            check_memory(args, self.header.inputs, self.header.written, ())
        return self.compiled(*args)

    @classmethod
    def serialize_compile_artifacts(cls, fn: SavedFunction) -> bytes:
        return json.dumps(vars(fn.header)).encode() + b"\n" + to_bytes(fn.compiled)

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> SavedFunction:
        head, _, code = data.partition(b"\n")
        read = json.loads(head)
        if read["torch"] != torch.__version__:
            raise ArtifactError(
                WHAT, f"it was compiled by torch {read['torch']}, and this is {torch.__version__}; compile it again"
            )
        load_all()  # the code may call ops of plugins
        header = SavedHeader(
            read["torch"], read["report"], read["ops"], tuple(read["inputs"]), tuple(read["written"])
        )
        refuse_other_ops(header.ops)
        loaded_reports.append(Report.from_json(header.report))
        return cls(from_bytes(code), header)


def to_be_saved(compiled: Compiled, graph: Graph, report: Report) -> tuple[Compiled, Report]:
    """The compiled graph as torch can save it, where it compiles to save; else as it is."""
    if not compiles_ahead():
        return compiled, report
    if not can_be_saved(compiled):
        raise GraphRefused(
            "this graph cannot be saved with its function: inputs share memory, or Inductor's caches are off. Compile"
            " it with inputs that lie apart and TORCHINDUCTOR_FORCE_DISABLE_CACHES unset"
        )
    report = replace(report, notes=(*report.notes, GLOBALS_NOTE))
    inputs, written = placeholders(graph), mutated_roots(graph)
    names = tuple(source_name(node) for node in inputs)
    numbers = tuple(index for index, node in enumerate(inputs) if node in written)
    return SavedFunction(
        compiled, SavedHeader(torch.__version__, report.to_json(), ops_of(graph), names, numbers)
    ), report


def refuse_eager() -> None:
    if compiles_ahead():
        raise UsageError("Backend(inductor=False) gives nothing that torch can save: compile with Backend()")


def source_name(node: torch.fx.Node) -> str:
    """As the program calls it: `x`, `self.cache`; the graph's name where nothing is known."""
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", None)
    said = str(name() if callable(name) else name or node.target)
    return LOCAL.sub(r"\1", said)


def ops_of(graph: Graph) -> dict[str, str]:
    targets = {node.target for node in all_nodes(graph) if isinstance(node.target, OpOverload)}
    return {op.name(): str(op._schema) for op in targets if op.namespace not in TORCH_NAMESPACES}


def refuse_other_ops(ops: dict[str, str]) -> None:
    """Raises where an op is missing here, or takes other arguments: its code would run into it in the middle."""
    for name, schema in ops.items():
        namespace, _, rest = name.partition("::")
        op, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, namespace), op, None)
        if packet is None:
            raise ArtifactError(
                WHAT,
                f"it calls {namespace}::{op}, which nothing here defines; first import what does",
            )
        here = getattr(packet, overload or "default", None)
        if here is None or str(here._schema) != schema:
            raise ArtifactError(
                WHAT, f"it was compiled for {schema}, and here that op is {here and here._schema}; compile it again"
            )


def portable_guards(entries: Sequence[Any]) -> list[bool]:
    """For torch.compile(…, options={"guard_filter_fn": graft.portable_guards}): the guards that torch can save. What
    is left out of them and holds a value of the program is a warning: a loaded function would not notice another."""
    kept = [not entry.is_global and guard_can_be_saved(entry) for entry in entries]
    lost = {
        entry.name: entry.value for entry, keep in zip(entries, kept, strict=True) if not keep and is_plain(entry)
    }
    if lost:
        told = ", ".join(f"{name} == {value!r}" for name, value in lost.items())
        warnings.warn(
            f"graft: a saved function does not check {told}; make them arguments or attributes of the module, or"
            " compile again where they change",
            stacklevel=2,
        )
    return kept


def is_plain(entry: Any) -> bool:
    return not VALUE_GUARDS.isdisjoint(entry.derived_guard_types)
