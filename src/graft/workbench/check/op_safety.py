"""Ops that a transform brings: do they do what their schemas say? Each is run once, on inputs of a recorded call
(graft/testing/op_calls.py). graft's own ops go through the same in its tests."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node, map_arg

from graft.ir.edit import attribute
from graft.ir.nodes import OpOverload
from graft.ops import OPS
from graft.passes.numeric.execution import RUN_ERRORS
from graft.passes.numeric.inputs import PieceWeights, TrialInputs
from graft.passes.numeric.trials import NumericTrial
from graft.passes.report import TransformRecord
from graft.testing.op_calls import call_problems


def brought_ops(gm: GraphModule, record: TransformRecord) -> dict[OpOverload, Node]:
    """The ops of others that its matches made, each with one call."""
    made = {name for match in record.matches for name in match.made}
    nodes = (n for n in gm.graph.nodes if n.name in made and isinstance(n.target, OpOverload))
    return {node.target: node for node in nodes if not is_own(node.target)}


def is_own(op: OpOverload) -> bool:
    """torch's, or graft's own: a package defines its ops in graft's namespace, too."""
    if op.namespace != "graft":
        return op.namespace in ("aten", "prims")
    spec = OPS.get(op._schema.name.removeprefix("graft::"))
    return spec is None or spec.reference.__module__.partition(".")[0] == "graft"


def op_problems(gm: GraphModule, node: Node) -> list[str]:
    """What is wrong with the op of this call; nothing where it keeps to its schema."""
    inputs = TrialInputs(NumericTrial(), PieceWeights(), {}, copy_weights=True)

    def value(source: Node) -> Any:
        return inputs.state(attribute(gm, str(source.target))) if source.op == "get_attr" else inputs.at(source)

    assert isinstance(node.target, OpOverload)
    try:
        return list(call_problems(node.target, map_arg(node.args, value), map_arg(node.kwargs, value)))
    except RUN_ERRORS as error:
        return [f"does not run on inputs of the recorded call: {type(error).__name__}: {str(error).splitlines()[0]}"]
