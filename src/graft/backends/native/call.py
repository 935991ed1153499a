"""Calls a compiled region: pointers in, results out. The arena grows to the largest call and stays."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from graft.backends.native.program import Program
from graft.base.errors import BadIndex, UsageError

ALIGN = 64  # bytes


class CallStruct(ctypes.Structure):
    """ops/view.h's Call."""

    _fields_ = (
        ("inputs", ctypes.c_void_p),
        ("sizes", ctypes.c_void_p),
        ("outputs", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("arena", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("scratch_floats", ctypes.c_int64),
        ("shared", ctypes.c_void_p),
        ("tokens", ctypes.c_int64),
        ("selected", ctypes.c_int64),
        ("problem", ctypes.c_void_p),
        ("stamps", ctypes.c_void_p),
        ("next", ctypes.c_void_p),
    )


class Threads:
    """The thread team of one library. A forked process has none of its parent's threads, so it makes its own."""

    def __init__(self, library: ctypes.CDLL, count: int) -> None:
        self.library = library
        self.count = count
        self.pid = 0
        self.team: int = 0
        library.graft_team.restype = ctypes.c_void_p
        library.graft_instructions.restype = ctypes.c_char_p

    @property
    def instructions(self) -> str:
        """What the kernels were compiled for, and whether the system lets them have it."""
        return self.library.graft_instructions().decode()

    def get(self) -> int:
        if self.pid != os.getpid():
            self.team, self.pid = self.library.graft_team(self.count), os.getpid()
        return self.team


class Arena:
    """Memory of all regions of a graph: they run one after the other."""

    def __init__(self) -> None:
        self.memory = torch.empty(0)
        self.lock = threading.Lock()

    def get(self, floats: int) -> int:
        """The address of at least so many floats."""
        if self.memory.numel() * 4 < floats * 4 + ALIGN:
            self.memory = fresh([floats + ALIGN // 4], torch.float32)
        address = self.memory.data_ptr()
        return address + -address % ALIGN


class RegionCall:
    """One region as a function of tensors."""

    def __init__(
        self, program: Program, library: ctypes.CDLL, threads: Threads, weights: Sequence[Tensor], arena: Arena
    ) -> None:
        self.program = program
        self.threads = threads
        self.weights = list(weights)
        self.arena = arena
        self.run = getattr(library, program.name)
        self.run.argtypes, self.run.restype = (ctypes.c_void_p, ctypes.c_void_p), None
        self.scratch, self.shared = (getattr(library, f"{program.name}_{kind}") for kind in ("scratch", "shared"))
        for floats in (self.scratch, self.shared):
            floats.argtypes, floats.restype = (ctypes.c_int64, ctypes.c_int64), ctypes.c_int64
        self.pointers = pointers(self.weights)
        self.stamps: list[list[int]] | None = None  # a list: every call adds the nanoseconds at which its steps began
        self.__name__ = program.name  # what the shell's code shows

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        program = self.program
        for index, dim in program.ones:
            if inputs[index].shape[dim] != 1:
                raise UsageError(
                    f"{program.inputs[index]} has {inputs[index].shape[dim]} rows of tokens, but a native step takes"
                    " one, with the tokens of all sequences; pack them, or use backend='eager'"
                )
        given: Sequence[Tensor] = inputs
        if not all(map(Tensor.is_contiguous, inputs)):
            given = [self.laid_out(index, tensor) for index, tensor in enumerate(inputs)]
        tokens, selected = (
            given[location[0]].shape[location[1]] if location else 0
            for location in (program.rows_from.get("tokens"), program.rows_from.get("selected"))
        )
        rows = {"T": tokens, "N": selected}
        outputs = tuple(
            fresh([rows[dim] if isinstance(dim, str) else dim for dim in output.shape], output.dtype)
            for output in program.outputs
        )
        with self.arena.lock:
            problem = self.start(given, outputs, tokens, selected)
        if problem:
            step = program.steps[problem - 1]
            raise BadIndex(step.node, step.path)
        return outputs

    def start(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], tokens: int, selected: int) -> int:
        program, count = self.program, self.threads.count
        scratch = -(-self.scratch(tokens, selected) // 16) * 16
        held = program.widths["tokens"] * tokens + program.widths["selected"] * selected
        own = held + scratch * count
        arena = self.arena.get(own + self.shared(tokens, selected))
        sizes = (ctypes.c_int64 * max(len(program.sizes), 1))(*(inputs[i].shape[d] for i, d in program.sizes))
        problem = ctypes.c_int64(0)
        given, made = pointers(inputs), pointers(outputs)
        stamps = None if self.stamps is None else (ctypes.c_int64 * (len(program.steps) + 1))()
        call = CallStruct(
            ctypes.addressof(given), ctypes.addressof(sizes), ctypes.addressof(made), ctypes.addressof(self.pointers),
            arena, arena + held * 4, scratch, arena + own * 4, tokens, selected, ctypes.addressof(problem),
            None if stamps is None else ctypes.addressof(stamps), None,
        )  # fmt: skip
        self.run(ctypes.byref(call), self.threads.get())
        if self.stamps is not None and stamps is not None:
            self.stamps.append(list(stamps))
        return problem.value

    def laid_out(self, index: int, tensor: Tensor) -> Tensor:
        """Row by row; a cache is written where it lies, so that a copy would lose what is written."""
        if tensor.is_contiguous():
            return tensor
        if index in self.program.written:
            raise UsageError(
                f"{self.program.inputs[index]} is written and does not lie row by row; pass a contiguous tensor"
            )
        return tensor.contiguous()


def fresh(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory that the step fills; what is in it before does not matter."""
    return torch.empty(shape, dtype=dtype)


def pointers(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * max(len(tensors), 1))(*map(Tensor.data_ptr, tensors))
