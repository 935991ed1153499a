"""fuse_elementwise: chains of pointwise ops that no named fusion took become one generated kernel."""

from __future__ import annotations

from collections.abc import Collection
from operator import getitem

import torch
from torch.fx import GraphModule, Node

from graft.graph.edit import Editor
from graft.graph.match import NearMiss
from graft.graph.memory import mutated_roots, storage_root
from graft.graph.nodes import is_op, module_path, same_sizes, tensor_of, tensor_val, where
from graft.transforms.base import BaseTransform, Context, Outcome, erase_dead, no_match_reason
from graft.transforms.elementwise import Step, is_pointwise, program_of, steps_of
from graft.transforms.regions import Grower, Region, insertion_nodes
from graft.transforms.registry import TransformRegistry
from graft.transforms.report import MatchRecord

MAX_OUTPUTS = 8


@TransformRegistry.register("fuse_elementwise")
class FuseElementwise(BaseTransform):
    """Connected pointwise ops of one loop shape become one call with the program of all of them.

    before:  %a = div(%x, 30.0);  %b = tanh(%a);  %c = mul(%b, 30.0)
    after:   %e = graft.elementwise([%x], "t0 = div(i0, 30.0); t1 = tanh(t0); t2 = mul(t1, 30.0); return t2")
             %c = getitem(%e, 0)

    A region has two ops or more, at most 64 ops, 16 inputs and 8 results (kernels with more spill registers), and is
    maximal: it takes every neighbour for which a place in the graph is left. Inner values that someone outside reads
    become further results. Views end a region; results are contiguous.

    Numerics: every value is rounded to the dtype that it has in eager, so results are bitwise with the reference and
    with Inductor's kernel on a CPU; the generated Triton kernel may be 2 units off in exp, tanh and their like.
    """

    def apply(self, gm: GraphModule, context: Context) -> Outcome:  # noqa: ARG002
        steps, unfit = self.sort_nodes(gm)
        keys = {node: loop_key(node) for node in steps}
        grower = Grower(gm.graph, keys, self.name)
        regions = grower.grow()
        pointwise = {*steps, *unfit}
        misses = [self.miss(node, reason) for node, reason in unfit.items() if has_neighbour(node, pointwise)]
        misses += grower.misses
        editor = Editor(gm, self.name)
        records: list[MatchRecord] = []
        places = insertion_nodes(gm.graph, regions)
        renamed: dict[Node, Node] = {}
        for region in regions:
            result = fuse(editor, region, steps, places[region], renamed)
            if isinstance(result, MatchRecord):
                records.append(result)
            else:
                misses.append(self.miss(region.nodes[-1], result, len(region.nodes)))
        erase_dead(editor, [node for region in regions for node in region.nodes])
        reason = "" if records else (no_match_reason(misses) if misses else NOTHING)
        return Outcome(tuple(records), tuple(misses), reason)

    def miss(self, node: Node, reason: str, size: int = 1) -> NearMiss:
        return NearMiss(self.name, where(node), f"%{node.name}", reason, 0, size)

    def sort_nodes(self, gm: GraphModule) -> tuple[dict[Node, list[Step]], dict[Node, str]]:
        """What can be generated, and what works element by element but cannot, with the reason."""
        steps: dict[Node, list[Step]] = {}
        unfit: dict[Node, str] = {}
        mutated = mutated_roots(gm.graph)
        for node in gm.graph.nodes:
            if not is_pointwise(node):
                continue
            said = steps_of(node)
            if mutated and storage_root(node) in mutated:
                said = f"{where(node)} is written in place"
            elif any(is_op(user, torch.ops.aten.as_strided.default) for user in node.users):
                said = f"{where(node)} is read by as_strided, which sees how it lies in memory"
            if isinstance(said, str):
                unfit[node] = said
            else:
                steps[node] = said
        return steps, unfit


def fuse(
    editor: Editor, region: Region, steps: dict[Node, list[Step]], before: Node, renamed: dict[Node, Node]
) -> MatchRecord | str:
    """Puts the call in, or says why not and leaves the graph as it was. The old nodes are erased by the caller: one
    of them may be the place where another call goes."""
    outputs, last = region.outputs(), region.nodes[-1]
    if len(outputs) > MAX_OUTPUTS:
        return f"{len(outputs)} of its values are read outside; a region gives at most {MAX_OUTPUTS}"
    inputs, program = program_of(steps, region.nodes, outputs, renamed)
    call = editor.call(torch.ops.graft.elementwise.default, (inputs, program.text), before=before, like=last)
    shape, wanted = call.meta["val"][0].shape, tensor_of(last).shape
    if not same_sizes(shape, wanted):
        editor.graph.erase_node(call)
        return f"its inputs broadcast to {tuple(shape)}, not to {tuple(wanted)}"
    made = [call.name]
    for index, old in enumerate(outputs):
        piece = editor.call(getitem, (call, index), before=before, like=old)
        made.append(piece.name)
        editor.replace(old, piece)
        renamed[old] = piece
    names = tuple(node.name for node in region.nodes)
    return MatchRecord(where(last), module_path(last), names, tuple(made), "elementwise")


NOTHING = "the graph has no two neighbouring pointwise ops of one shape that a kernel can be generated for"


def loop_key(node: Node) -> tuple[object, ...]:
    result = tensor_of(node)
    return (*(str(size) for size in result.shape), result.device)


def has_neighbour(node: Node, pointwise: Collection[Node]) -> bool:
    """Reads or feeds another pointwise op of its own shape; alone it would stay as it is anyway."""
    result = tensor_val(node)
    near = [other for other in (*node.all_input_nodes, *node.users) if other in pointwise]
    shapes = [value.shape for other in near if (value := tensor_val(other)) is not None]
    return result is not None and any(same_sizes(shape, result.shape) for shape in shapes)
