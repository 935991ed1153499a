"""From the nodes of a region to a program: what each value is, and which kernels run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from graft.backends.native.arena import lay_out
from graft.backends.native.program import (
    CTYPES,
    LANES,
    Argument,
    Buffer,
    HeadLayout,
    InputPointer,
    KernelCall,
    NativeKernel,
    NativeOutput,
    NativeWeight,
    NotLowered,
    OutputPointer,
    Program,
    Rows,
    Size,
    Text,
    Value,
    WeightPointer,
)
from graft.ir.nodes import is_op, module_path, placeholders, static_int, tensor_of, tensor_val
from graft.weights.tiles import TILES

aten = torch.ops.aten
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ROWS = {"tokens": "T", "selected": "N"}
Lowering = Callable[["Planner", Node], None]
LOWERINGS: dict[object, Lowering] = {}


def lowers(*targets: object) -> Callable[[Lowering], Lowering]:
    """The function lowers calls of these ops: it adds steps and binds the node's value, or raises NotLowered."""

    def register(lowering: Lowering) -> Lowering:
        LOWERINGS.update(dict.fromkeys(targets, lowering))
        return lowering

    return register


@dataclass(frozen=True)
class RowSizes:
    """How the graph writes its sizes: the batch, which is 1, and what counts as rows."""

    batch: str
    rows: dict[str, Rows]

    @staticmethod
    def of(graph: Graph) -> RowSizes:
        """From the inputs that the engine passes, by their names (ops/layout.py)."""
        shapes = {node.name: tensor_of(node).shape for node in placeholders(graph) if tensor_val(node) is not None}
        if "input_ids" not in shapes or len(shapes["input_ids"]) != 2:
            raise NotLowered("the graph has no input_ids [1, tokens]: it is not a decoder of the engine")
        batch, tokens = shapes["input_ids"]
        rows: dict[str, Rows] = {str(tokens): "tokens", str(batch * tokens): "tokens"}
        if "logits_indices" in shapes:
            rows[str(shapes["logits_indices"][0])] = "selected"
        return RowSizes(str(batch), rows)

    def layout(self, tensor: torch.Tensor, kinds: tuple[torch.dtype, ...] = FLOATS) -> HeadLayout:
        if tensor.dtype not in kinds:
            raise NotLowered(f"it is {str(tensor.dtype).removeprefix('torch.')}; rows are 16- or 32-bit floats")
        dims: list[Any] = list(tensor.shape)
        dims = dims[1:] if dims and str(dims[0]) == self.batch else dims
        found = [index for index, dim in enumerate(dims) if str(dim) in self.rows]
        rest = [static_int(dim) for index, dim in enumerate(dims) if index not in found[:1]]
        if len(found) != 1 or found[0] > 1 or len(dims) > 3 or None in rest or (found[0] == 1 and len(dims) < 3):
            raise NotLowered(f"its shape {list(map(str, tensor.shape))} is not rows of tokens")
        rows = self.rows[str(dims[found[0]])]
        sizes = [size for size in rest if size is not None]
        if len(sizes) < 2:
            return HeadLayout(rows, 1, sizes[0] if sizes else 1, "flat")
        return HeadLayout(rows, sizes[0], sizes[1], "heads" if found[0] == 1 else "rows")


class Planner:
    """Holds what is known about the nodes of one region while it is lowered."""

    def __init__(
        self, sizes: RowSizes, inputs: Sequence[Node], nodes: Collection[Node], native: Collection[Node]
    ) -> None:
        self.shapes = sizes
        self.inputs = list(inputs)
        self.nodes = nodes  # of the region
        self.native = native  # of all regions
        self.values: dict[Node, Value | tuple[Value, ...]] = {}
        self.steps: list[KernelCall] = []
        self.buffers: dict[str, Buffer] = {}
        self.weights: dict[NativeWeight, int] = {}
        self.sizes: dict[tuple[int, int], int] = {}
        self.written: set[int] = set()

    # ── what a node is ──────────────────────────────────────────────────────────────────────────────────────────

    def layout(self, node: Node) -> HeadLayout:
        return self.shapes.layout(tensor_of(node))

    def value(self, node: Any) -> Value:
        """The rows of a node; an input of floats is copied into the arena the first time it is read."""
        if not isinstance(node, Node):
            raise NotLowered(f"{node} is not a tensor")
        if node not in self.values and node in self.inputs:
            self.take(node)
        found = self.values.get(node)
        if not isinstance(found, Value):
            raise NotLowered(f"%{node.name} is no rows of tokens")
        return found

    def flat(self, node: Any) -> Value:
        """Rows whose heads, if any, lie side by side."""
        value = self.value(node)
        if not value.dense:
            raise NotLowered(f"%{node.name} is a part of every head")
        return value

    def ids(self, node: Any) -> Value:
        """Ids of experts, which are kept as floats."""
        if node not in self.values and node in self.inputs:
            self.take(node, (torch.int64,))
        return self.value(node)

    def take(self, node: Node, kinds: tuple[torch.dtype, ...] = FLOATS) -> None:
        layout = self.shapes.layout(tensor_of(node), kinds)
        value = self.new(node, layout)
        self.bind(node, value)
        self.step(
            node, NativeKernel(f"take<{CTYPES[tensor_of(node).dtype]}>", "TransferArgs", ROWS_HEADER, ("x",)),
            memory=InputPointer(self.inputs.index(node)), **strides(layout), rows=self.rows(layout), x=value,
        )  # fmt: skip

    def rows(self, layout: HeadLayout) -> Text:
        return Text(ROWS[layout.rows])

    def pointer(self, node: Any, dtype: torch.dtype = torch.int64, *, written: bool = False) -> InputPointer:
        """An input that is read where it lies: indices, block tables, caches."""
        if node not in self.inputs:
            raise NotLowered(f"{node} is computed, and it is read where an input lies")
        kind = tensor_of(node).dtype
        if kind is not dtype:
            raise NotLowered(f"%{node.name} is {kind}, not {dtype}")
        index = self.inputs.index(node)
        if written:
            self.written.add(index)
        return InputPointer(index, "void" if dtype in FLOATS else CTYPES[dtype])

    def size(self, node: Node, dim: int) -> Size:
        key = (self.inputs.index(node), dim)
        return Size(self.sizes.setdefault(key, len(self.sizes)))

    def weight(
        self, node: Any, form: Any, ctype: str = "void", *, gated: bool = False, transposed: bool = False
    ) -> WeightPointer:
        """A tensor of the module, or the transpose of one."""
        if is_op(node, aten.transpose.int) and tensor_of(node).dim() == 2:
            return self.weight(node.args[0], form, ctype, gated=gated, transposed=not transposed)
        if not isinstance(node, Node) or node.op != "get_attr":
            raise NotLowered(f"{node} is computed, and it stands where a weight does")
        if tensor_of(node).dtype not in (*FLOATS, TILES):
            raise NotLowered(f"the weight {node.target} is {tensor_of(node).dtype}")
        key = NativeWeight(str(node.target), form, gated, transposed)
        return WeightPointer(self.weights.setdefault(key, len(self.weights)), ctype)

    def vector(self, node: Any) -> WeightPointer:
        """A weight of one dim, in float32."""
        if tensor_of(node).dim() > 1:
            raise NotLowered(f"{node} is {list(tensor_of(node).shape)}, not one row")
        return self.weight(node, "float32", "float")

    def vector_or_null(self, node: Any) -> WeightPointer | Text:
        return Text("nullptr") if node is None else self.vector(node)

    # ── what is made ────────────────────────────────────────────────────────────────────────────────────────────

    def new(self, node: Node, layout: HeadLayout | None = None, part: str = "") -> Value:
        """A buffer for a node's result."""
        layout = layout or self.layout(node)
        name = f"{node.name}{part}"
        self.buffers[name] = Buffer(name, layout.rows, -(-layout.width // LANES) * LANES, layout.width)
        return Value(name, layout, 0, layout.size)

    def bind(self, node: Node, value: Value | tuple[Value, ...]) -> None:
        self.values[node] = value

    def step(self, node: Node, kernel: NativeKernel, /, **fields: Argument) -> None:
        """Fields are the members of the kernel's arguments; `a__b` is the member b of the member a."""
        named = tuple((name.replace("__", "."), value) for name, value in fields.items())
        self.steps.append(KernelCall(kernel, named, node.name, module_path(node)))

    def lower(self, node: Node) -> None:
        """Adds the steps of a node, or raises NotLowered and leaves all as it was."""
        lowering = LOWERINGS.get(node.target)
        if lowering is None:
            raise NotLowered(f"there is no native kernel of {node.target}")
        before = len(self.steps), dict(self.values)
        try:
            lowering(self, node)
        except NotLowered:
            del self.steps[before[0] :]
            self.values = before[1]
            raise

    def problem(self, node: Node) -> str | None:
        """Why a node cannot be a part of this region, or None: its steps are then added."""
        if node in self.values:
            return None
        try:
            self.lower(node)
        except NotLowered as reason:
            return str(reason)
        return None

    def program(self, name: str, results: Sequence[Node]) -> Program:
        direct: dict[str, int] = {}
        outputs = []
        for index, node in enumerate(results):
            value, tensor = self.value(node), tensor_of(node)
            outputs.append(NativeOutput(tuple(self.output_dim(dim) for dim in tensor.shape), tensor.dtype))
            buffer = self.buffers[value.buffer]
            if tensor.dtype is torch.float32 and is_whole(value, buffer) and value.buffer not in direct:
                direct[value.buffer] = index
                self.buffers[value.buffer] = replace(buffer, width=value.layout.width)
            else:
                self.give(node, value, index)
        steps = tuple(self.steps)
        used = {value.buffer for step in steps for value in values_of(step)}
        buffers = tuple(buffer for buffer in self.buffers.values() if buffer.name in used)
        locations, widths, barriers = lay_out(steps, buffers, direct)
        return Program(
            name, steps, buffers, locations, barriers, widths, tuple(self.weights),
            tuple(node.name for node in self.inputs), frozenset(self.written), tuple(self.sizes),
            self.rows_from(), self.ones(), tuple(outputs),
        )  # fmt: skip

    def give(self, node: Node, value: Value, index: int) -> None:
        self.step(
            node, NativeKernel(f"give<{CTYPES[tensor_of(node).dtype]}>", "TransferArgs", ROWS_HEADER, ("memory",)),
            memory=OutputPointer(index), **strides(value.layout), rows=self.rows(value.layout), x=value,
        )  # fmt: skip

    def output_dim(self, dim: Any) -> int | str:
        text = str(dim)
        return (
            1 if text == self.shapes.batch else ROWS[self.shapes.rows[text]] if text in self.shapes.rows else int(dim)
        )

    def rows_from(self) -> dict[Rows, tuple[int, int]]:
        found: dict[Rows, tuple[int, int]] = {}
        for location, size in self.input_dims():
            if size in self.shapes.rows:
                found.setdefault(self.shapes.rows[size], location)
        return found

    def ones(self) -> tuple[tuple[int, int], ...]:
        return tuple(location for location, size in self.input_dims() if size == self.shapes.batch)

    def input_dims(self) -> list[tuple[tuple[int, int], str]]:
        return [
            ((index, dim), str(size))
            for index, node in enumerate(self.inputs)
            if tensor_val(node) is not None
            for dim, size in enumerate(tensor_of(node).shape)
        ]


ROWS_HEADER = "backends/native/rows.h"


def strides(layout: HeadLayout) -> dict[str, Argument]:
    """Of a contiguous tensor with that layout."""
    if layout.order == "heads":
        return {"row_stride": layout.size, "head_stride": Text(f"{ROWS[layout.rows]} * {layout.size}")}
    return {"row_stride": layout.width, "head_stride": layout.size}


def is_whole(value: Value, buffer: Buffer) -> bool:
    """The value is all that is written into the buffer, and lies as its tensor would."""
    plain = value.layout.order != "heads" or value.layout.heads == 1
    return value.column == 0 and value.layout.width == buffer.filled and value.dense and plain


def values_of(step: KernelCall) -> list[Value]:
    """Every value in the step's arguments."""
    found = []
    for _, argument in step.fields:
        value = argument if isinstance(argument, Value) else getattr(argument, "value", None)
        found += [value] if isinstance(value, Value) else []
    return found
