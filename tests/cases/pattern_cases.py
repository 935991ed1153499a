"""Small graphs for tests of patterns: a body over weights, what a pattern finds in it, and what a rewrite makes."""

from __future__ import annotations

import torch
from torch import nn

import graft.ops  # noqa: F401
from graft.ir.patterns.match import Finder
from graft.ir.trace import export_graph
from graft.passes.base import Context, Stage, TransformConfig
from graft.passes.patterns import PatternTransform, Rewrite

ops = torch.ops.graft
X, W = {"x": "b s d"}, {"weight": "n d"}
GATES = {"gate": "b s d", "up": "b s d"}


class Body(nn.Module):
    def __init__(self, body, *shapes):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(shape) for shape in shapes)
        self.body = body

    def forward(self, *inputs):
        return self.body(*inputs, *self.weights)


def graph_of(body, *shapes, inputs=None):
    inputs = (torch.randn(2, 3, 8),) if inputs is None else inputs
    return export_graph(Body(body, *shapes), inputs)


def find(pattern, shapes, body, *weights, inputs=None):
    gm = graph_of(body, *weights, inputs=inputs)
    return Finder(pattern, shapes).find(gm.graph)


def names(gm):
    return [
        str(n.target).removeprefix("aten.").removesuffix(".default")
        for n in gm.graph.nodes
        if n.op == "call_function"
    ]


def rewritten(pattern, replacement, shapes, gm):
    """The graph with every match replaced, and how many there were."""

    class Words(PatternTransform):
        name = "words"

        def rewrites(self):
            return [Rewrite(pattern, replacement, shapes)]

    outcome = Words(TransformConfig(Stage.FUSE)).apply(gm, Context())
    assert outcome.matches, outcome
    gm.recompile()
    return gm, len(outcome.matches)
