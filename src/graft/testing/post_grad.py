"""The graph that Inductor would generate code for: functional, taken apart, after its post-grad passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph

from graft.backends.inductor import post_grad_backend, reset_compiler
from graft.backends.inductor_caches import without_caches
from graft.ir.io.text import graph_text, target_text
from graft.ir.nodes import calls
from graft.testing.failure import failure
from graft.testing.fusion import name_of


@dataclass(frozen=True)
class PostGrad:
    """What torch.compile made of a function, a graph for each piece between graph breaks.

    before, after: the graphs as text, around the post-grad passes (graft's and Inductor's own). result: of the last
    graphs, run by FX; no code is generated, so it takes a fraction of a second.
    """

    result: Any
    graphs: tuple[Graph, ...]
    before: tuple[str, ...] = field(repr=False)
    after: tuple[str, ...] = field(repr=False)

    @property
    def graph(self) -> Graph:
        """The only graph; several are an error."""
        if len(self.graphs) != 1:
            raise failure(
                "one graph",
                f"{len(self.graphs)} graphs, so the function breaks (or nothing in it was compiled)",
                [line for text in self.after for line in text.splitlines()[:3]],
                advice="read .graphs, or take out what breaks: torch.compile(…, fullgraph=True) names it",
            )
        return self.graphs[0]

    @property
    def called(self) -> list[str]:
        """The ops of all graphs, in order: `graft.rms_norm`, `aten.mm`."""
        return [target_text(node.target) for graph in self.graphs for node in calls(graph)]


def post_grad_graph(
    function: Callable[..., Any],
    *args: Any,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    **kwargs: Any,
) -> PostGrad:
    """Compiles `function` for these arguments as far as the post-grad graph, without gradients.

    options: as for torch.compile, e.g. `graft.passes_for_inductor()`; left out, it is stock Inductor's graph.
    """
    texts: dict[str, list[str]] = {"before": [], "after": []}
    graphs: list[Graph] = []

    def see(when: str, gm: torch.fx.GraphModule) -> None:
        texts[when].append(graph_text(gm.graph))
        if when == "after":
            graphs.append(gm.graph)

    reset_compiler()
    try:
        with without_caches(), torch.no_grad():
            backend = post_grad_backend(options or {}, see)
            result = torch.compile(function, backend=backend, dynamic=dynamic)(*args, **kwargs)
    finally:
        reset_compiler()
    if not graphs:
        raise failure(
            f"{name_of(function)} is compiled", "Dynamo made no graph of it, so there is nothing to look at",
            advice="graft stages ask breaks says why",
        )  # fmt: skip
    return PostGrad(result, tuple(graphs), tuple(texts["before"]), tuple(texts["after"]))
