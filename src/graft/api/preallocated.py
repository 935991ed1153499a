"""`compiled(x, out=…)`: results in memory that the caller brings.

    before:  %n = mul(%x, %w);  return %n
    after:   %out = input;  %n = mul(%x, %w);  copy_(%out, %n);  return %out

The graph with one more input a result, which it writes, is lowered like any other: eager and the CUDA graph compute
the result in `out` itself where its op can (memory/write_through.py), Inductor fuses the copy into the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import CodeGen, Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from graft.api.checks import MemoryCheck
from graft.api.donation import DIRECT
from graft.backends import InductorSettings, lower
from graft.base.errors import OutRefused, UsageError
from graft.capture.containers import put_together, take_apart
from graft.ir.edit import second_module
from graft.ir.io.pytrees import nesting, result_names, unflatten
from graft.ir.nodes import leaves, output_node, placeholders, static_int, tensor_of, tensor_val
from graft.ir.program.signature import compile_expression
from graft.memory.write_through import write_through
from graft.passes.library.fix_functionalization import NAME as FIX

if TYPE_CHECKING:
    from graft.api.variant import Variant, VariantSettings

aten = torch.ops.aten


@dataclass(frozen=True)
class FilledGraph:
    """The graph that fills `positions` of the results; `call` takes the inputs, then the tensors for those."""

    call: Any
    memory: MemoryCheck


def run_into(variant: Variant, settings: VariantSettings, values: Sequence[Any], out: Any) -> Any:
    """The call with its results in `out`, which is nested as they are; None where one is to be allocated."""
    if variant.returned is not None:
        raise UsageError("out= is not for a module compiled with a StaticCache; leave out= away")
    given, names, spec = fitted(variant, out)
    check_outs(variant, values, given, names)
    positions = tuple(index for index, tensor in enumerate(given) if tensor is not None)
    brought = [given[index] for index in positions]
    usual = all(tensor.is_contiguous() for tensor in brought)
    key = positions, usual
    if key not in variant.filled:
        variant.filled[key] = fill(variant, settings, positions, [names[i] for i in positions], usual)
    filled = variant.filled[key]
    filled.memory([*values, *brought])
    results = filled.call(*values, *brought)
    return put_together(unflatten(list(results), spec), variant.results)


def fitted(variant: Variant, out: Any) -> tuple[list[Any], list[str], Any]:
    """`out` flat, and the names and the structure of the results."""
    plain, _ = take_apart(out, results=True)
    given, found = pytree.tree_flatten(plain)
    info = nesting(variant.graph_module.graph)
    spec = info.out_spec if info is not None else None
    if spec is None:
        raise UsageError("out= needs a graph that says how its results are nested")
    names = result_names(spec, "out")
    if result_names(found, "out") != names:
        raise OutRefused("out", f"holds {', '.join(result_names(found, 'out'))}, but results are {', '.join(names)}")
    return given, names, spec


def check_outs(variant: Variant, values: Sequence[Any], given: Sequence[Any], names: Sequence[str]) -> None:
    """Raises where a tensor has not the dtype, the device and the sizes of its result in this call."""
    results = list(leaves(output_node(variant.graph_module.graph).args[0]))
    bound = variant.signature.bind(values)
    for tensor, node, name in zip(given, results, names, strict=True):
        if tensor is None:
            continue
        recorded = tensor_val(node) if isinstance(node, Node) else None
        if not isinstance(tensor, torch.Tensor) or recorded is None:
            raise OutRefused(name, "is no tensor, or its result is none; pass None for it")
        if tensor.requires_grad:
            raise OutRefused(name, "requires gradients, which results that are written into it do not carry")
        if tensor.layout is not torch.strided or recorded.layout is not torch.strided:
            raise OutRefused(name, "or its result is sparse; only strided tensors are written into")
        if (tensor.dtype, tensor.device) != (recorded.dtype, recorded.device):
            wanted = f"{recorded.dtype} on {recorded.device}"
            raise OutRefused(name, f"is {tensor.dtype} on {tensor.device}, but its result is {wanted}")
        sizes = tuple(size_of(size, bound, name) for size in recorded.shape)
        if tuple(tensor.shape) != sizes:
            raise OutRefused(name, f"has the shape {tuple(tensor.shape)}, but its result has {sizes}")


def size_of(size: Any, bound: dict[str, int], name: str) -> int:
    if (number := static_int(size)) is not None:
        return number
    try:
        return int(compile_expression(str(size))(bound))
    except NameError as error:  # a symbol that no input binds
        raise OutRefused(name, f"stands for a result of {size} elements, known only when it has run") from error


def fill(
    variant: Variant, settings: VariantSettings, positions: Sequence[int], names: Sequence[str], usual: bool
) -> FilledGraph:
    gm = with_outs(variant.graph_module, positions)
    if usual and variant.backend in DIRECT:  # the program's own copies stay as the pipeline left them
        write_through(gm.graph, set(placeholders(gm.graph)[len(variant.names) :]))
    gm.recompile()
    asked = InductorSettings(settings.mode, settings.options, settings.config.transforms[FIX].enabled)
    lowered = lower(
        gm, variant.backend, settings.config.kernels, reuse_outputs=settings.reuse_outputs, inductor=asked
    )
    count = len(variant.names)
    memory = MemoryCheck(
        [*variant.names, *names], range(count, count + len(names)), [*gm.parameters(), *gm.buffers()]
    )
    return FilledGraph(lowered.call, memory)


def with_outs(gm: GraphModule, positions: Sequence[int]) -> GraphModule:
    """The graph with flat inputs and results, and one more input for each of `positions`, into which it copies."""
    filled = second_module(gm)
    graph: Graph = filled.graph
    graph.set_codegen(CodeGen())
    end = output_node(graph)
    results = list(leaves(end.args[0]))
    inputs = placeholders(graph)
    first = inputs[-1].next if inputs else next(iter(graph.nodes))
    for position in positions:
        value = results[position]
        recorded = tensor_of(value)
        with graph.inserting_before(first):
            into = graph.placeholder(f"graft_out_{position}")
        into.meta["val"] = recorded.new_empty_strided(recorded.shape, recorded.stride())
        with graph.inserting_before(end):
            copy = graph.call_function(aten.copy_.default, (into, value))
        copy.meta["val"] = into.meta["val"]
        results[position] = into
    end.args = (tuple(results),)
    return filled
