"""The values that a real prompt has at the inputs of a match: what a model's own weights make of a few tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from graft.ir.evaluate import Subprogram
from graft.ops.layout import HostBatch, pack
from graft.passes.numeric.execution import RUN_ERRORS, on_cpu
from graft.passes.numeric.sides import Sides

TOKENS, VOCABULARY = 12, 100  # no model has fewer tokens
PARAMETERS = 200_000_000  # of a model whose graph is run for this
BLOCK = 16


def activations(sides: Sides, wanted: Sequence[Node]) -> dict[Node, Any]:
    """The values of these nodes; none where the graph is not a decoder's before its cache, or has no weights."""
    weights = list(sides.state.values())
    if any(t.is_meta for t in weights) or sum(t.numel() for t in weights) > PARAMETERS:
        return {}
    known = prompt()
    inputs = [node for node, call in sides.old.items() if call.op == "placeholder"]
    if not inputs or not all(node.name in known for node in inputs):
        return {}
    origin = {new: old for old, new in sides.successors.items()}
    sources = {node: origin.get(node, node) for node in wanted}
    if not all(source in sides.old for source in sources.values()):
        return {}
    whole = Subprogram(
        tuple(sources.values()), sides.old, sides.state.__getitem__, lambda n: n if n.op == "placeholder" else None
    )
    try:
        with torch.no_grad():
            values = whole.run(PromptInputs(known), on_cpu)
    except RUN_ERRORS:
        return {}
    return dict(zip(wanted, values, strict=True))


def prompt() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
    host = HostBatch()
    host.add(tokens, 0, [0], BLOCK)
    packed = vars(pack(host, torch.device("cpu")))
    return {name: packed[name] for name in ("input_ids", "position_ids", "logits_indices")}


class PromptInputs:
    """The tokens at the inputs, and the model's own weights."""

    def __init__(self, known: dict[str, torch.Tensor]) -> None:
        self.known = known

    def at(self, node: Node) -> Any:
        return self.known[node.name].clone()

    def state(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone()
