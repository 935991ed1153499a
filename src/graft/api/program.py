"""An ExportedProgram as what graft.compile works on: its graph, its names, its sizes, its state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from graft.api.call_form import CallForm
from graft.base.errors import CaptureError, UsageError
from graft.capture.dynamic import input_names
from graft.capture.module import CapturedModule
from graft.ir.io.symbols import finite
from graft.ir.nodes import placeholders, val
from graft.ir.program.signature import read_signature
from graft.ir.trace import program_graph

NOTE = "captured by torch.export: sizes are those of its range constraints, and other paths through it are not there"


@dataclass(frozen=True)
class CapturedProgram:
    captured: CapturedModule
    form: CallForm
    inputs: list[Any]  # examples, where the program holds some that are tensors


def capture_program(
    program: ExportedProgram, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> CapturedProgram:
    """The program is captured already; what example inputs would say it says itself."""
    if dynamic_shapes is not None:
        raise UsageError("the sizes of an ExportedProgram are those it was exported with; leave out dynamic_shapes")
    module, gm = program.module(), program_graph(program)
    values = [val(node) for node in placeholders(gm.graph)]
    spec = program.call_spec.in_spec
    if spec is None or spec.num_leaves != len(values):
        raise CaptureError("the program's inputs are nested in a way that it does not say; export it again")
    own_args, own_kwargs = pytree.tree_unflatten(values, spec)
    form = CallForm.of(module, own_args, own_kwargs, by_key=True)
    signature = read_signature(gm, values, input_names(module, own_args, own_kwargs))
    ranges = {
        str(symbol): (finite(limits.lower) or 0, finite(limits.upper))
        for symbol, limits in program.range_constraints.items()
        if str(symbol) in signature.ranges
    }
    signature = replace(signature, ranges=signature.ranges | ranges)
    if not (args or kwargs) and program.example_inputs is not None:
        args, kwargs = program.example_inputs
    inputs = pytree.tree_leaves(form.apply(tuple(args), dict(kwargs))) if args or kwargs else []
    return CapturedProgram(CapturedModule(gm, signature, notes=(NOTE,)), form, inputs)
