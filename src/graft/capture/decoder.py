"""A Hugging Face decoder as one graph: (input_ids, position_ids) → logits, for any batch and length."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node, map_arg
from torch.fx.graph import CodeGen
from transformers import PreTrainedModel

from graft.capture.attention import graft_attention
from graft.errors import UnsupportedAttention
from graft.graph.edit import attach_state
from graft.graph.nodes import calls, is_op
from graft.graph.trace import export_graph
from graft.graph.verify import module_state

PREFIX = "decoder"
# Neither is 1 (export would fix it) nor equal to the other (export would tie them together).
EXAMPLE_BATCH, EXAMPLE_LENGTH = 2, 9


class Decoder(torch.nn.Module):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.decoder = model
        self.train(model.training)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits


def capture_decoder(model: PreTrainedModel) -> GraphModule:
    """Captures for any batch and length. The graph's names are the checkpoint's; weights are shared with `model`.

    Each row of the batch is one sequence, whatever its positions. The graph returns a tuple of one: the logits
    [b, s, vocab].
    """
    device = next(model.parameters()).device
    ids = torch.zeros((EXAMPLE_BATCH, EXAMPLE_LENGTH), dtype=torch.int64, device=device)
    positions = torch.arange(EXAMPLE_LENGTH, device=device).expand(EXAMPLE_BATCH, -1).contiguous()
    dynamic = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    with graft_attention(model):
        gm = export_graph(
            Decoder(model), (ids, positions), dynamic_shapes={"input_ids": dynamic, "position_ids": dynamic}
        )
    gm = drop_prefix(gm)
    if not any(is_op(node, torch.ops.graft.attention.default) for node in calls(gm.graph)):
        raise UnsupportedAttention(
            type(model).__name__,
            "it does not call Hugging Face's AttentionInterface, so no attention was captured",
        )
    return gm


def drop_prefix(gm: GraphModule) -> GraphModule:
    """`decoder.model.layers.0…` becomes `model.layers.0…`, in targets, node names and module stacks."""
    root = torch.nn.Module()
    for name, tensor in module_state(gm).items():
        attach_state(root, name.removeprefix(f"{PREFIX}."), tensor)
    graph, copies = Graph(), {}
    for node in gm.graph.nodes:
        attribute = node.op == "get_attr"
        copies[node] = graph.create_node(
            node.op,
            str(node.target).removeprefix(f"{PREFIX}.") if attribute else node.target,
            map_arg(node.args, copies.__getitem__),
            map_arg(node.kwargs, copies.__getitem__),
            name=node.name.removeprefix(f"{PREFIX}_") if attribute else node.name,
        )
        copies[node].meta = {**node.meta, **plain_stack(node)}
    graph.set_codegen(CodeGen())  # tensors in, a tuple out; no pytrees
    return GraphModule(root, graph, class_name="CapturedDecoder")


def plain_stack(node: Node) -> dict[str, dict[str, tuple[str, str]]]:
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return {}
    return {"nn_module_stack": {k: (path.removeprefix(PREFIX).lstrip("."), cls) for k, (path, cls) in stack.items()}}
