"""A lowered native step as data, and back without planning or compiling anything: what an artifact keeps of it.

regions    what a call of each compiled function needs to know (Program, but for the fields that became C++)
weights    by name, as kernels read them
shell      how regions follow each other; where nodes stayed eager, a graph that calls graft::native_region
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from graft.backends.native.call import Arena, RegionCall, Threads
from graft.backends.native.cpu import thread_count
from graft.backends.native.program import KernelCall, NativeKernel, NativeOutput, NativeWeight, Program

if TYPE_CHECKING:
    from graft.backends.native.build import Built

# never run: a loaded graph calls its regions in place of it
LIBRARY = torch.library.Library("graft", "FRAGMENT")
LIBRARY.define("native_region(Tensor(a!)[] inputs, int index) -> Tensor[]")


@dataclass(frozen=True)
class NativeStep:
    """What lowering made: the shell with regions as calls and graft's ops not bound yet, and why these stay eager."""

    shell: GraphModule
    calls: Sequence[RegionCall]
    reasons: Mapping[str, str]
    built: Built


def weight_name(weight: NativeWeight) -> str:
    marks = [weight.form, *(["gated"] if weight.gated else []), *(["transposed"] if weight.transposed else [])]
    return f"{weight.target}:{':'.join(marks)}"


def step_weights(step: NativeStep) -> dict[str, Tensor]:
    """Every weight of every region once."""
    return {
        weight_name(weight): tensor
        for call in step.calls
        for weight, tensor in zip(call.program.weights, call.weights, strict=True)
    }


# ── programs ────────────────────────────────────────────────────────────────────────────────────────────────────


def program_data(program: Program) -> dict[str, Any]:
    return {
        "name": program.name,
        "steps": [[step.kernel.name, step.node, step.path] for step in program.steps],
        "barriers": sorted(program.barriers),
        "widths": program.widths,
        "weights": [asdict(weight) for weight in program.weights],
        "inputs": program.inputs,
        "written": sorted(program.written),
        "sizes": program.sizes,
        "rows_from": program.rows_from,
        "ones": program.ones,
        "outputs": [[output.shape, str(output.dtype).removeprefix("torch.")] for output in program.outputs],
    }


def read_program(data: Mapping[str, Any]) -> Program:
    """Buffers and fields are in the compiled code alone."""
    steps = tuple(KernelCall(NativeKernel(name, "", ""), (), node, path) for name, node, path in data["steps"])
    return Program(
        data["name"], steps, (), {}, frozenset(data["barriers"]), data["widths"],
        tuple(NativeWeight(**weight) for weight in data["weights"]), tuple(data["inputs"]),
        frozenset(data["written"]), tuple((i, d) for i, d in data["sizes"]),
        {rows: (i, d) for rows, (i, d) in data["rows_from"].items()}, tuple((i, d) for i, d in data["ones"]),
        tuple(NativeOutput(tuple(shape), getattr(torch, dtype)) for shape, dtype in data["outputs"]),
    )  # fmt: skip


# ── the shell ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class PlainShell:
    """Regions alone: each call takes inputs and results of earlier ones by name."""

    inputs: tuple[str, ...]
    calls: tuple[tuple[int, tuple[str, ...], tuple[str, ...]], ...]  # region, what it takes, what it gives
    outputs: tuple[str, ...]


def plain_shell(step: NativeStep) -> PlainShell | None:
    """None where anything but regions runs."""
    nodes = list(step.shell.graph.nodes)
    regions = {node: step.calls.index(node.target) for node in nodes if isinstance(node.target, RegionCall)}
    parts = [node for node in nodes if node.target is getitem and node.args[0] in regions]
    inputs = tuple(node.name for node in nodes if node.op == "placeholder")
    ends = [node for node in nodes if node.op == "output"]
    if len(inputs) + len(regions) + len(parts) + len(ends) != len(nodes) or len(ends) != 1:
        return None
    results = ends[0].args[0]
    if not isinstance(results, (list, tuple)) or any(one not in parts for one in results):
        return None
    given = {(node.args[0], node.args[1]): node.name for node in parts}
    calls = tuple(
        (
            index,
            tuple(arg.name for arg in node.args),
            tuple(given.get((node, i), "") for i in range(len(step.calls[index].program.outputs))),
        )
        for node, index in regions.items()
    )
    return PlainShell(inputs, calls, tuple(one.name for one in results))


class NativeCall:
    """A plain shell as a function of tensors."""

    def __init__(self, shell: PlainShell, regions: Sequence[RegionCall]) -> None:
        self.shell, self.regions = shell, regions

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        values = dict(zip(self.shell.inputs, inputs, strict=True))
        for index, taken, given in self.shell.calls:
            made = self.regions[index](*(values[name] for name in taken))
            values |= dict(zip(given, made, strict=True))
        return tuple(values[name] for name in self.shell.outputs)


def shell_graph(step: NativeStep) -> GraphModule:
    """The shell with each region as a call of graft::native_region, which can be stored."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(step.shell.graph, {}))
    graph.set_codegen(step.shell.graph._codegen)
    for node in graph.nodes:
        if isinstance(node.target, RegionCall):
            index = step.calls.index(node.target)
            node.target, node.args = torch.ops.graft.native_region.default, (list(node.args), index)
    return GraphModule(step.shell, graph)


def put_regions(gm: GraphModule, regions: Sequence[RegionCall]) -> None:
    for node in gm.graph.nodes:
        if node.target is torch.ops.graft.native_region.default:
            node.target, node.args = regions[node.args[1]], tuple(node.args[0])


def region_calls(
    programs: Sequence[Program], library: ctypes.CDLL, weight: Callable[[str], Tensor]
) -> tuple[list[RegionCall], Threads]:
    arena, team = Arena(), Threads(library, thread_count())
    calls = [
        RegionCall(program, library, team, [weight(weight_name(one)) for one in program.weights], arena)
        for program in programs
    ]
    return calls, team
