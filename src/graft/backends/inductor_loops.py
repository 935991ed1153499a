"""scan and map on Inductor, which makes loops of them whose counter it reads as a number.

A fake tensor gives no number unless its shape environment allows such outputs, which Dynamo leaves off by default:
then Inductor ends with `DataDependentOutputException: aten._local_scalar_dense.default`, on plain torch.compile too
(torch 2.13). Whoever writes such a loop wants it compiled, so it is on for these graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from graft.ir.branches import all_nodes

COUNTED = ("scan", "map_impl")


def has_counted_loops(graph: Graph) -> bool:
    return any(map(is_counted_loop, all_nodes(graph)))


def is_counted_loop(node: Node) -> bool:
    target = node.target
    return getattr(target, "namespace", "") == "higher_order" and getattr(target, "__name__", "") in COUNTED


def with_counters(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled`, which Dynamo captures at its first call, with numbers out of tensors allowed."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            return compiled(*args, **kwargs)

    return call


@contextmanager
def counters_allowed(graph: Graph, inputs: Sequence[Any]) -> Iterator[None]:
    """The same for a graph that Dynamo has captured: in the shape environment of its inputs."""
    from torch._dynamo.utils import detect_fake_mode

    mode = detect_fake_mode(inputs) if has_counted_loops(graph) else None
    sizes = mode.shape_env if mode is not None else None
    if sizes is None:
        yield
        return
    before = sizes.settings
    sizes.settings = replace(before, allow_scalar_outputs=True)
    try:
        yield
    finally:
        sizes.settings = before
