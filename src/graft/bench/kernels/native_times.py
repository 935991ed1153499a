"""When each step of a native region began, as its first thread notes it: for the table of kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.fx import GraphModule

from graft.backends.native.call import RegionCall
from graft.backends.native.program import KernelCall

Noted = Mapping[RegionCall, list[list[int]]]  # nanoseconds at which the steps of each call began, and it ended


@contextmanager
def watched(graph: Any) -> Iterator[Noted]:
    """The native regions of a lowered graph; inside the block they note their times, anew."""
    nodes = graph.graph.nodes if isinstance(graph, GraphModule) else ()
    regions = [node.target for node in nodes if isinstance(node.target, RegionCall)]
    noted: dict[RegionCall, list[list[int]]] = {region: [] for region in regions}
    for region, stamps in noted.items():
        region.stamps = stamps
    try:
        yield noted
    finally:
        for region in regions:
            region.stamps = None


def native_steps(noted: Noted) -> list[tuple[str, str, float, float]]:
    """Name, sizes, start and duration (µs) of every step in every call; waiting for others is part of it."""
    return [
        (f"native {step.kernel.name}", sizes(step), begin / 1e3, (end - begin) / 1e3)
        for region, calls in noted.items()
        for stamps in calls
        for step, begin, end in zip(region.program.steps, stamps, stamps[1:], strict=False)
    ]


def sizes(step: KernelCall) -> str:
    """`576→960` of a GEMM."""
    fields: dict[str, Any] = dict(step.fields)
    return f"{fields['k']}→{fields['n']}" if "k" in fields and "n" in fields else ""
