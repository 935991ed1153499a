"""Ops that a transform brings: do they do what their schemas say? Each is run once, on inputs of a recorded call.

A write that is not declared, a result that lies in an input's memory, a second run that gives something else, a fake
implementation with other shapes (torch.library.opcheck), and on a GPU a wait for the device. graft's own ops go
through the same in its tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node, map_arg

from graft.ir.canonical.normal_form import is_random
from graft.ir.edit import attribute
from graft.ir.effects import alias_sources, mutated_args
from graft.ir.nodes import OpOverload
from graft.passes.numeric.execution import RUN_ERRORS, on_cpu, tensors
from graft.passes.numeric.inputs import PieceWeights, TrialInputs, same
from graft.passes.numeric.trials import NumericTrial
from graft.passes.report import TransformRecord

OWN = ("aten", "prims", "graft")
OPCHECKS = ("test_schema", "test_faketensor")


def brought_ops(gm: GraphModule, record: TransformRecord) -> dict[OpOverload, Node]:
    """The ops of others that its matches made, each with one call."""
    made = {name for match in record.matches for name in match.made}
    nodes = (n for n in gm.graph.nodes if n.name in made and isinstance(n.target, OpOverload))
    return {node.target: node for node in nodes if node.target.namespace not in OWN}


def op_problems(gm: GraphModule, node: Node) -> list[str]:
    """What is wrong with the op of this call; nothing where it keeps to its schema."""
    try:
        return list(found_problems(gm, node))
    except RUN_ERRORS as error:
        return [f"does not run on inputs of the recorded call: {type(error).__name__}: {str(error).splitlines()[0]}"]


def found_problems(gm: GraphModule, node: Node) -> Iterator[str]:
    declared = set(mutated_args(node))
    inputs = TrialInputs(NumericTrial(), PieceWeights(), {}, copy_weights=True)
    with torch.no_grad():
        first = on_cpu(node.target, *arguments(gm, node, inputs))
        if changed := inputs.changed(declared):
            yield f"writes into {changed} and does not declare it in mutates_args"
        if not alias_sources(node) and shares_memory(first, list(inputs.handed.values())):
            yield "returns memory of an input and does not declare it; return a copy"
        inputs.forget()
        second = on_cpu(node.target, *arguments(gm, node, inputs))
        if not is_random(node) and not same(list(tensors(first)), list(tensors(second))):
            yield "gives another result in a second run on the same inputs; an op that samples has a tag for that"
        yield from waits(gm, node, inputs)
        inputs.forget()
        args, kwargs = arguments(gm, node, inputs)
    try:
        torch.library.opcheck(node.target, args, kwargs, test_utils=OPCHECKS)
    except Exception as error:  # noqa: BLE001  whatever torch raises is its finding
        lines = [line for line in str(error).splitlines() if line.strip()]
        yield f"fails torch.library.opcheck: {lines[0] if lines else type(error).__name__}"


def arguments(gm: GraphModule, node: Node, inputs: TrialInputs) -> tuple[Any, Any]:
    def value(source: Node) -> Any:
        return inputs.state(attribute(gm, str(source.target))) if source.op == "get_attr" else inputs.at(source)

    return map_arg(node.args, value), map_arg(node.kwargs, value)


def shares_memory(results: Any, given: list[Any]) -> bool:
    memory = {t.untyped_storage().data_ptr() for t in tensors(given) if t.numel()}
    return any(t.untyped_storage().data_ptr() in memory for t in tensors(results) if t.numel())


def waits(gm: GraphModule, node: Node, inputs: TrialInputs) -> Iterator[str]:
    """On a GPU: a call that waits for the device stops the host in every step."""
    if not any(t.is_cuda for t in tensors(list(inputs.handed.values()))):
        return
    args, kwargs = arguments(gm, node, inputs)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        node.target(*args, **kwargs)
    except RuntimeError as error:
        yield f"waits for the device: {str(error).splitlines()[0]}"
    finally:
        torch.cuda.set_sync_debug_mode(mode)
