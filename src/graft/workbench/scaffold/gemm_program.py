"""A pattern with one GEMM in it as a program: how the rows that it multiplies are made, and what is done to its sums.

What stands before the GEMM is a program over rows (row_program.py) whose result is a row of the GEMM's input. What
stands behind it is computed from single sums, while they are in registers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from graft.ir.nodes import calls, is_op, output_node, placeholders, tensor_of, where
from graft.ir.patterns.arguments import WORKING_DTYPE
from graft.passes.patterns import Rewrite
from graft.workbench.scaffold.body import Body, literals_of, tensor_arguments
from graft.workbench.scaffold.kernel import FIRST, SECOND
from graft.workbench.scaffold.row_program import (
    CASTS,
    PRIMES,
    WIDE_PRIMES,
    NoRows,
    RowBlock,
    RowInput,
    RowLanguage,
    RowWriter,
    Stretch,
    check_shapes,
    dims,
    pointwise_steps,
    read_input,
    returned_nodes,
    sources,
    traced,
)

LINEAR = torch.ops.aten.linear.default
RANK = 3  # of the rows: sequences, tokens, columns
NAME = "argument"  # in a node's meta: which argument of the pattern it is
# what the GEMM gives, among the inputs of what stands behind it; a row that it multiplies, which is made before it
SUMS, ROW = "gemm_sums", "gemm_row"


@dataclass(frozen=True)
class GemmProgram:
    """before: what the rows of the GEMM are made of, by the blocks of the prologue; without blocks its one input is
    multiplied as it is. behind: what the epilogue reads beside the sums. wide: the result is float32 always."""

    weight: str
    depth: int | str
    width: int | str
    before: tuple[RowInput, ...]
    prologue: tuple[RowBlock, ...]
    behind: tuple[RowInput, ...]
    epilogue: Stretch
    wide: bool
    helpers: tuple[str, ...]
    numbers: tuple[str, ...]

    @property
    def inputs(self) -> tuple[RowInput, ...]:
        """Each once; a row that both parts read is one input."""
        return tuple(dict.fromkeys((*self.before, *self.behind)))


def gemm_program(body: Body, rewrite: Rewrite, language: RowLanguage) -> GemmProgram | str:
    """The pattern as a GEMM with a prologue and an epilogue, or why it is none."""
    try:
        return written_program(body, rewrite, language)
    except NoRows as reason:
        return str(reason)


def written_program(body: Body, rewrite: Rewrite, language: RowLanguage) -> GemmProgram:
    names, sizes = list(literals_of(body.pattern)), sizes_of(body)
    values = [{name: base * (i + 1) for i, name in enumerate(names)} for base in (FIRST, SECOND)]
    graphs = [named_inputs(traced(body, rewrite, literals, sizes), body) for literals in values]
    refuse_width_dependent(body, rewrite, values[0], graphs[0], sizes)
    letters = {size: letter for letter, size in sizes.items()}
    cuts = [cut_at_gemm(graph) for graph in graphs]
    weight = cuts[0].weight
    depth, width = (letters.get(int(n), int(n)) for n in tensor_of(weight).shape[::-1])
    rows, sums = (
        writer_of(one, other, letters, values, language)
        for one, other in ((cuts[0].before, cuts[1].before), (cuts[0].behind, cuts[1].behind))
    )
    loose = next((n for n in calls(sums.graph) if n not in sums.steps and not is_op(n, *CASTS)), None)
    if loose is not None:
        raise NoRows(f"{where(loose)} behind its GEMM is not computed number by number")
    result = result_of(sums.graph)
    if tensor_of(result).shape != (*tensor_of(result).shape[:-1], tensor_of(weight).shape[0]):
        raise NoRows("its result is not as wide as what its GEMM gives")
    (epilogue,) = sums.stretches((result,), width)
    return GemmProgram(
        weight.meta[NAME], depth, width, tuple(rows.inputs.values()), prologue_of(rows, depth),
        tuple(one for one in sums.inputs.values() if one.name != SUMS), epilogue,
        tensor_of(result).dtype is torch.float32, tuple(sorted(rows.helpers | sums.helpers)), tuple(names),
    )  # fmt: skip


def sizes_of(body: Body) -> dict[str, int]:
    """A size for each letter."""
    if any(isinstance(value, int) for value in literals_of(body.pattern).values()):
        raise NoRows("it takes whole numbers, which may be sizes")
    letters = sorted({c for shape in body.shapes.values() for c in shape.partition(":")[0] if c.isalpha()})
    if len(letters) > len(PRIMES) or any(not p.isalnum() for s in body.shapes.values() for p in dims(s)):
        raise NoRows("its sizes follow from others")
    return dict(zip(letters, PRIMES, strict=False))


def named_inputs(graph: Graph, body: Body) -> Graph:
    """Each input with the name of its argument."""
    for node, name in zip(placeholders(graph), tensor_arguments(body.pattern), strict=True):
        node.meta[NAME] = name
    return graph


def refuse_width_dependent(
    body: Body, rewrite: Rewrite, literals: dict[str, float], narrow: Graph, sizes: dict[str, int]
) -> None:
    """x[..., :2000] is all of a narrow row. One letter at a time is wide: a matrix of two would be large."""
    for letter in dict.fromkeys(dims(shape)[-1] for shape in body.shapes.values() if dims(shape)):
        if letter in sizes:
            try:
                wide = traced(body, rewrite, literals, {**sizes, letter: WIDE_PRIMES[0]})
            except NoRows as error:
                raise NoRows("it does something else with wide rows than with narrow ones") from error
            if [node.target for node in calls(wide)] != [node.target for node in calls(narrow)]:
                raise NoRows("it does something else with wide rows than with narrow ones")


# ── the cut ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class GemmParts:
    """One trace of a pattern, cut at its GEMM: `before` ends in its rows, `behind` begins with its sums."""

    weight: Node
    before: Graph
    behind: Graph


def cut_at_gemm(graph: Graph) -> GemmParts:
    gemms = [node for node in calls(graph) if is_op(node, LINEAR)]
    if len(gemms) != 1:
        raise NoRows(f"it has {len(gemms) or 'no'} linear layer{'s' * (len(gemms) != 1)}")
    (gemm,) = gemms
    given, weight, bias = (*gemm.args, None)[:3]
    if weight.op != "placeholder" or list(weight.users) != [gemm]:  # pyrefly: ignore
        raise NoRows("the weight of its GEMM is computed, or read by something else too")
    if tensor_of(weight).dtype is not WORKING_DTYPE:  # pyrefly: ignore
        raise NoRows(f"the weight of its GEMM is {tensor_of(weight).dtype}, whatever the model computes in")  # pyrefly: ignore
    if tensor_of(given).dim() != RANK or tensor_of(weight).dim() != 2:  # pyrefly: ignore
        raise NoRows(f"the rows of its GEMM are not of {RANK} dims")
    ahead = ancestors(given)  # pyrefly: ignore
    later = [node for node in calls(graph) if node not in ahead and node is not gemm]
    for node in later:
        early = next((source for source in sources(node) if source in ahead and source.op != "placeholder"), None)
        if early is not None:
            raise NoRows(f"{where(early)} is read by the GEMM and behind it")
    results = returned_nodes(graph)
    if len(results) > 1:
        raise NoRows("it gives several results, and the tiles of its GEMM are of one")
    before = cut([node for node in calls(graph) if node in ahead], given)  # pyrefly: ignore
    return GemmParts(weight, before, cut(later, results[0], gemm, bias))  # pyrefly: ignore


def ancestors(node: Node) -> set[Node]:
    found, queue = {node}, [node]
    for one in queue:
        fresh = [source for source in one.all_input_nodes if source not in found]
        found.update(fresh)
        queue += fresh
    return found


def cut(nodes: list[Node], result: Node, gemm: Node | None = None, bias: Node | None = None) -> Graph:
    """These calls as a graph of their own. gemm: the linear layer that becomes an input; its bias is added."""
    graph, copies, inside = Graph(), {}, set(nodes)
    read = [gemm, bias, result, *(source for node in nodes for source in node.all_input_nodes)]
    for node in dict.fromkeys(one for one in read if one is not None and one not in inside):
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = {NAME: SUMS, **node.meta}
    if gemm is not None and bias is not None:
        copies[gemm] = graph.call_function(torch.ops.aten.add.Tensor, (copies[gemm], copies[bias]))
        copies[gemm].meta = dict(gemm.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[result])
    return graph


# ── its parts ───────────────────────────────────────────────────────────────────────────────────────────────────


def writer_of(
    one: Graph, other: Graph, letters: dict[int, str], values: list[dict[str, float]], language: RowLanguage
) -> RowWriter:
    """What writes one part; `other` is the same traced with other numbers."""
    inputs = {node: read_input(node, node.meta[NAME], RANK, letters) for node in placeholders(one)}
    steps = pointwise_steps(one, other)
    check_shapes(one, inputs, (result_of(one),))
    return RowWriter(one, steps, inputs, dict(letters), values, language)


def result_of(graph: Graph) -> Node:
    return output_node(graph).args[0]  # pyrefly: ignore


def prologue_of(rows: RowWriter, depth: int | str) -> tuple[RowBlock, ...]:
    given = result_of(rows.graph)
    if given.op == "placeholder":
        return ()
    blocks = (*rows.blocks(), RowBlock("store", (ROW,), depth, rows.stretches((given,), depth)))
    if any(len(block.stretches) > 1 for block in blocks):
        raise NoRows("what stands before its GEMM puts parts of rows together")
    if any(block.kind not in ("scalar", "store") and block.width == 1 for block in blocks):
        raise NoRows("what stands before its GEMM reduces a single number")
    return blocks
