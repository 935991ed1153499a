"""fuse_elementwise: chains of pointwise ops that no named fusion took become one generated kernel."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from operator import getitem

import torch
from torch.fx import GraphModule, Node

from graft.graph.edit import Editor
from graft.graph.match import Match, NearMiss, Refused
from graft.graph.memory import mutated_roots, storage_root
from graft.graph.nodes import is_op, same_sizes, tensor_of, tensor_val, where
from graft.transforms.base import Context
from graft.transforms.elementwise import Step, is_pointwise, program_of, steps_of
from graft.transforms.regions import Grower, Region, insertion_nodes
from graft.transforms.registry import TransformRegistry
from graft.transforms.rewriter import Rewriter, Run

MAX_OUTPUTS = 8


@TransformRegistry.register("fuse_elementwise")
class FuseElementwise(Rewriter):
    """Connected pointwise ops of one loop shape become one call with the program of all of them.

    before:  %a = div(%x, 30.0);  %b = tanh(%a);  %c = mul(%b, 30.0)
    after:   %e = graft.elementwise([%x], "t0 = div(i0, 30.0); t1 = tanh(t0); t2 = mul(t1, 30.0); return t2")
             %c = getitem(%e, 0)

    A region has two ops or more, at most 64 ops, 16 inputs and 8 results (kernels with more spill registers), and is
    maximal: it takes every neighbour for which a place in the graph is left. Inner values that someone outside reads
    become further results. Views end a region; results are contiguous.

    Numerics: every value is rounded to the dtype that it has in eager, so results are bitwise with the reference and
    with Inductor's kernel on a CPU; the generated Triton kernel may be 2 units off in exp, tanh and their like.

    A walk: a region is whatever neighbours there are, of any size and form.
    """

    find_first = True
    lacking = "the graph has no two neighbouring pointwise ops of one shape that a kernel can be generated for"

    def start(self, gm: GraphModule, context: Context) -> ElementwiseRun:
        steps, unfit = self.sort_nodes(gm)
        grower = Grower(gm.graph, {node: loop_key(node) for node in steps}, self.name)
        regions = grower.grow()
        run = ElementwiseRun(gm, context, Editor(gm, self.name), steps=steps, unfit=unfit, regions=regions)
        run.places, run.grown = insertion_nodes(gm.graph, regions), grower.misses
        return run

    def candidates(self, run: ElementwiseRun) -> Iterator[Node | Region]:
        pointwise = {*run.steps, *run.unfit}
        yield from (node for node in run.unfit if has_neighbour(node, pointwise))
        run.misses += run.grown
        yield from run.regions

    def find(self, run: ElementwiseRun, candidate: Node | Region) -> RegionMatch:
        if isinstance(candidate, Node):
            raise Refused(candidate, run.unfit[candidate])
        nodes, outputs = candidate.nodes, candidate.outputs()
        last = nodes[-1]
        if len(outputs) > MAX_OUTPUTS:
            reason = f"{len(outputs)} of its values are read outside; a region gives at most {MAX_OUTPUTS}"
            raise Refused(last, reason)
        inputs, _ = program_of(run.steps, nodes, outputs, {})
        shape = torch.broadcast_shapes(*(tensor_of(node).shape for node in inputs))
        wanted = tensor_of(last).shape
        if not same_sizes(shape, wanted):
            raise Refused(last, f"its inputs broadcast to {tuple(shape)}, not to {tuple(wanted)}")
        return RegionMatch("elementwise", {}, {}, tuple(nodes), (last,), candidate)

    def check(self, run: ElementwiseRun, match: RegionMatch) -> None:
        """A region has a place between what it reads and who reads it; inner values that are read are results."""

    def write(self, run: ElementwiseRun, match: RegionMatch) -> list[Node]:
        region, before, editor = match.region, run.places[match.region], run.editor
        outputs = region.outputs()
        inputs, program = program_of(run.steps, region.nodes, outputs, editor.successors)
        args = (inputs, program.text)
        call = editor.call(torch.ops.graft.elementwise.default, args, before=before, like=match.anchor)
        made = [call]
        for index, old in enumerate(outputs):
            made.append(editor.call(getitem, (call, index), before=before, like=old))
            editor.replace(old, made[-1])
        return made

    def near_miss(self, run: ElementwiseRun, candidate: Node | Region, refused: Refused) -> NearMiss:
        size = len(candidate.nodes) if isinstance(candidate, Region) else 1
        return replace(super().near_miss(run, candidate, refused), matched=0, size=size)

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


@dataclass(frozen=True)
class RegionMatch(Match):
    region: Region


@dataclass
class ElementwiseRun(Run):
    """steps: what can be generated. unfit: what works element by element but cannot, with the reason."""

    steps: dict[Node, list[Step]] = field(default_factory=dict)
    unfit: dict[Node, str] = field(default_factory=dict)
    regions: list[Region] = field(default_factory=list)
    places: dict[Region, Node] = field(default_factory=dict)
    grown: list[NearMiss] = field(default_factory=list)


def loop_key(node: Node) -> tuple[object, ...]:
    result = tensor_of(node)
    return (*(str(size) for size in result.shape), result.device)


def has_neighbour(node: Node, pointwise: Collection[Node]) -> bool:
    """Reads or feeds another pointwise op of its own shape; alone it would stay as it is anyway."""
    result = tensor_val(node)
    near = [other for other in (*node.all_input_nodes, *node.users) if other in pointwise]
    shapes = [value.shape for other in near if (value := tensor_val(other)) is not None]
    return result is not None and any(same_sizes(shape, result.shape) for shape in shapes)
