"""What a native step is, before it is C++: values in buffers, steps over them, and where everything lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Rows = Literal["tokens", "selected"]  # how many rows a buffer has: one a token, or one for each row of logits
Order = Literal["flat", "rows", "heads"]  # [rows, w]; [rows, heads, d]; [heads, rows, d], which lies as the second

CTYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "f16", torch.int64: "int64_t"}
LANES = 16  # rows of a buffer begin at multiples of so many floats


@dataclass(frozen=True)
class HeadLayout:
    """A tensor's shape as rows of heads of `size` values."""

    rows: Rows
    heads: int
    size: int
    order: Order

    @property
    def width(self) -> int:
        return self.heads * self.size


@dataclass(frozen=True)
class Value:
    """float32 numbers of a buffer: some of its columns, perhaps in heads. Views share the buffer."""

    buffer: str
    layout: HeadLayout
    column: int = 0
    head_stride: int = 0

    @property
    def dense(self) -> bool:
        """The heads of a row lie side by side."""
        return self.layout.heads == 1 or self.head_stride == self.layout.size


@dataclass(frozen=True)
class Buffer:
    name: str
    rows: Rows
    width: int  # floats from one row to the next
    filled: int  # floats of a row that steps write


@dataclass(frozen=True)
class BufferLocation:
    """Where a buffer lies: in the arena, `offset` floats a row of its kind from the start, or in a result."""

    offset: int = 0
    output: int | None = None


# ── what stands in a field of a step's arguments ────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Pointer:
    """The first element of a value."""

    value: Value


@dataclass(frozen=True)
class Stride:
    """Floats from one row of a value to the next."""

    value: Value


@dataclass(frozen=True)
class InputPointer:
    """Memory of an input: indices or a cache."""

    index: int
    ctype: str = "void"


@dataclass(frozen=True)
class OutputPointer:
    index: int


@dataclass(frozen=True)
class WeightPointer:
    index: int
    ctype: str = "void"


@dataclass(frozen=True)
class Size:
    """The size of an input's dim, read at every call: entry `index` of Program.sizes."""

    index: int


@dataclass(frozen=True)
class Text:
    """C++ as it is: `T`, `Act::silu`."""

    text: str


Argument = Value | Pointer | Stride | InputPointer | OutputPointer | WeightPointer | Size | Text | int | float | bool


@dataclass(frozen=True)
class NativeKernel:
    """A C++ function. `writes` names the fields of its arguments that it writes; it reads the others."""

    name: str  # `linear<WeightPlain<float>>`
    struct: str  # `LinearArgs`; empty where there is a body
    header: str  # where both are: from graft's folder on, or a whole path
    writes: tuple[str, ...] = ("out",)
    scratch: str = "0"  # floats that a thread needs, in C++
    shared: str = "0"  # floats that all threads of the step need together; the field `shared` points to them
    told: tuple[str, ...] = ()  # fields that something is assigned to whatever it is: unset they are not zero
    body: tuple[str, ...] = ()  # C++ in place of a call; the fields are then variables, `{counter}` hands out chunks


@dataclass(frozen=True)
class KernelCall:
    """One call of a kernel by every thread."""

    kernel: NativeKernel
    fields: tuple[tuple[str, Argument], ...]
    node: str
    path: str  # of the module


@dataclass(frozen=True)
class NativeWeight:
    """A tensor of the module: `as_is`, as `float32`, or packed for the GEMM (fused_linear/native_packing.py)."""

    target: str
    form: Literal["as_is", "float32", "f32", "bf16", "f16"]
    gated: bool = False
    transposed: bool = False  # it lies as [k, n]


@dataclass(frozen=True)
class NativeOutput:
    """Shape with `T` and `N` for the rows."""

    shape: tuple[int | str, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Program:
    """A region of the graph. Inputs and outputs are in the order of the call."""

    name: str
    steps: tuple[KernelCall, ...]
    buffers: tuple[Buffer, ...]
    locations: dict[str, BufferLocation]
    barriers: frozenset[int]  # steps that wait for all before them
    widths: dict[Rows, int]  # floats of arena for each row
    weights: tuple[NativeWeight, ...]
    inputs: tuple[str, ...]
    written: frozenset[int]  # inputs that are written: caches
    sizes: tuple[tuple[int, int], ...]  # input and dim
    rows_from: dict[Rows, tuple[int, int]]  # input and dim that tell how many rows there are
    ones: tuple[tuple[int, int], ...]  # inputs and dims that must be 1: the batch
    outputs: tuple[NativeOutput, ...]


class NotLowered(Exception):
    """Why a node is left to the eager backend: for the report, and no failure."""
