"""The values that a real prompt has at the inputs of a match: what a model's own weights make of a few tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch.fx import Node, map_arg

from graft.ir.effects import is_mutating
from graft.ir.evaluate import Subprogram
from graft.ops.layout import HostBatch, pack
from graft.passes.numeric.execution import RUN_ERRORS, first_line, on_cpu
from graft.passes.numeric.sides import Sides, writing

TOKENS, VOCABULARY = 12, 100  # no model has fewer tokens
PARAMETERS = 200_000_000  # of a model whose graph is run for this
BLOCK = 16


class PromptActivations:
    """Runs the graph before a transform on a prompt, as far as it is asked for, each call once.

    lacking: why there are none, for what a check did not cover; '' where there are, or where no prompt could be.
    """

    def __init__(self, sides: Sides) -> None:
        self.sides = sides
        self.known = prompt()
        self.values: dict[Node, Any] = {}
        self.origin = {new: old for old, new in sides.successors.items()}
        self.lacking = self.problem

    @cached_property
    def problem(self) -> str:
        weights = list(self.sides.state.values())
        if "input_ids" not in {node.name for node in self.inputs}:
            return ""
        if unknown := [node.name for node in self.inputs if node.name not in self.known]:
            return f"the graph also reads %{unknown[0]}"
        if any(t.is_meta for t in weights):
            return "the weights have no values"
        if sum(t.numel() for t in weights) > PARAMETERS:
            return f"the model has more than {PARAMETERS // 10**6} M parameters"
        return ""

    @cached_property
    def inputs(self) -> list[Node]:
        return [node for node, call in self.sides.old.items() if call.op == "placeholder"]

    @cached_property
    def writes(self) -> bool:
        return any(is_mutating(node) for node in self.sides.old if node.op == "call_function")

    def at(self, wanted: Sequence[Node]) -> dict[Node, Any]:
        """The values of these nodes; none where the graph is not a decoder's before its cache, or has no weights."""
        self.lacking = self.problem
        if self.problem or not self.inputs or not all(node.name in self.known for node in self.inputs):
            return {}
        sources = {node: self.origin.get(node, node) for node in wanted}
        if foreign := [node for node, source in sources.items() if source not in self.sides.old]:
            self.lacking = f"%{foreign[0].name} is not in the graph that was there before"
            return {}
        try:
            with torch.no_grad():
                self.run(list(sources.values()))
        except RUN_ERRORS as error:
            self.lacking = f"the graph does not run on them ({first_line(error)})"
            return {}
        return {node: self.values[source] for node, source in sources.items()}

    def run(self, wanted: list[Node]) -> None:
        """What a graph writes is not kept for the next question: it runs again."""
        if self.writes:
            self.values.clear()
        state = self.sides.state.__getitem__
        old, last = self.sides.old, max((self.sides.old[node].index for node in wanted), default=0)
        ahead = tuple(node for node in writing(old) if old[node].index < last)
        whole = Subprogram(tuple(wanted), old, state, lambda n: n if n.op == "placeholder" else None, ahead)
        for node in whole.program:
            if node not in self.values:
                self.values[node] = self.value(node)

    def value(self, node: Node) -> Any:
        call = self.sides.old[node]
        if call.op == "placeholder":
            return self.known[node.name].clone()
        if call.op == "get_attr":
            weight = self.sides.state[str(call.target)].detach()
            return weight.clone() if self.writes else weight
        args, kwargs = (map_arg(given, self.values.__getitem__) for given in (call.args, call.kwargs))
        return on_cpu(call.target, args, kwargs)


def prompt() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
    host = HostBatch()
    host.add(tokens, 0, [0], BLOCK)
    packed = vars(pack(host, torch.device("cpu")))
    return {name: packed[name] for name in ("input_ids", "position_ids", "logits_indices")}
