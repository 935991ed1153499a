"""Where buffers lie, and which steps must wait: both follow from what each step reads and writes.

Two buffers share memory when no step needs both. A buffer begins `offset` floats a row into the arena of its kind, so
that one plan serves any number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graft.backends.native.program import (
    Buffer,
    BufferLocation,
    InputPointer,
    KernelCall,
    OutputPointer,
    Pointer,
    Rows,
    Value,
)

SHARED = "shared"  # the field of memory that all threads of a step fill together; the next step to use it waits
Memory = tuple[str, int, int]  # a kind of memory, first and last offset in it


def lay_out(
    steps: Sequence[KernelCall], buffers: Sequence[Buffer], direct: Mapping[str, int]
) -> tuple[dict[str, BufferLocation], dict[Rows, int], frozenset[int]]:
    """Locations, floats a row of each kind, and the steps before which there is a barrier. `direct`: lie in a
    result."""
    lives = lifetimes(steps)
    locations = {name: BufferLocation(output=index) for name, index in direct.items()}
    widths: dict[Rows, int] = {"tokens": 0, "selected": 0}
    placed: list[tuple[Buffer, int]] = []
    inside = [buffer for buffer in buffers if buffer.name not in direct]
    for buffer in sorted(inside, key=lambda buffer: lives[buffer.name]):
        first, last = lives[buffer.name]
        taken = sorted(
            (offset, offset + other.width)
            for other, offset in placed
            if other.rows == buffer.rows and lives[other.name][0] <= last and first <= lives[other.name][1]
        )
        offset = first_gap(taken, buffer.width)
        placed.append((buffer, offset))
        locations[buffer.name] = BufferLocation(offset)
        widths[buffer.rows] = max(widths[buffer.rows], offset + buffer.width)
    return locations, widths, barriers(steps, {buffer.name: buffer for buffer in buffers}, locations)


def lifetimes(steps: Sequence[KernelCall]) -> dict[str, tuple[int, int]]:
    """First and last step that touch a buffer."""
    lives: dict[str, tuple[int, int]] = {}
    for index, step in enumerate(steps):
        for _, argument in step.fields:
            value = argument if isinstance(argument, Value) else getattr(argument, "value", None)
            if isinstance(value, Value):
                lives[value.buffer] = (lives.get(value.buffer, (index, index))[0], index)
    return lives


def first_gap(taken: Sequence[tuple[int, int]], width: int) -> int:
    offset = 0
    for first, end in taken:
        if offset + width <= first:
            break
        offset = max(offset, end)
    return offset


def barriers(
    steps: Sequence[KernelCall], buffers: Mapping[str, Buffer], locations: Mapping[str, BufferLocation]
) -> frozenset[int]:
    """A step waits when one since the last barrier wrote what it touches, or touched what it writes."""
    found = set()
    read: list[Memory] = []
    written: list[Memory] = []
    for index, step in enumerate(steps):
        reads, writes = touched(step, buffers, locations)
        if clash(writes, [*read, *written]) or clash(reads, written):
            found.add(index)
            read, written = [], []
        read += reads
        written += writes
    return frozenset(found)


def clash(some: Sequence[Memory], others: Sequence[Memory]) -> bool:
    return any(a[0] == b[0] and a[1] < b[2] and b[1] < a[2] for a in some for b in others)


def touched(
    step: KernelCall, buffers: Mapping[str, Buffer], locations: Mapping[str, BufferLocation]
) -> tuple[list[Memory], list[Memory]]:
    """What a step reads, and what it writes."""
    reads: list[Memory] = []
    writes: list[Memory] = []
    for name, argument in step.fields:
        value = argument.value if isinstance(argument, Pointer) else argument
        if isinstance(value, Value):
            buffer, location = buffers[value.buffer], locations[value.buffer]
            inside = location.output is None
            memory = (
                (buffer.rows, location.offset, location.offset + buffer.width)
                if inside
                else (f"out{location.output}", 0, 1)
            )
        elif name == SHARED:
            memory = (SHARED, 0, 1)
        elif isinstance(argument, (InputPointer, OutputPointer)):
            memory = (f"{type(argument).__name__}{argument.index}", 0, 1)
        else:
            continue
        (writes if name in (*step.kernel.writes, SHARED) else reads).append(memory)
    return reads, writes
