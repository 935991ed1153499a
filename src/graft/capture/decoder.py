"""A Hugging Face decoder as one graph: (input_ids, position_ids) → logits, for any batch and length."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.graph import CodeGen
from transformers import PreTrainedModel

from graft.capture.attention import graft_attention
from graft.capture.recurrence import graft_recurrence
from graft.capture.state import check_captured, check_state
from graft.ir.prefix import drop_prefix
from graft.ir.trace import export_graph

PREFIX = "decoder"
CLASS_NAME = "CapturedDecoder"
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
    kept = check_state(model)
    gm = export_decoder(model)
    check_captured(model, kept, gm)
    return gm


def export_decoder(model: PreTrainedModel) -> GraphModule:
    """The graph alone, unchecked."""
    device = next(model.parameters()).device
    ids = torch.zeros((EXAMPLE_BATCH, EXAMPLE_LENGTH), dtype=torch.int64, device=device)
    positions = torch.arange(EXAMPLE_LENGTH, device=device).expand(EXAMPLE_BATCH, -1).contiguous()
    dynamic = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    with graft_attention(model), graft_recurrence(model):
        gm = export_graph(
            Decoder(model), (ids, positions), dynamic_shapes={"input_ids": dynamic, "position_ids": dynamic}
        )
    return drop_prefix(gm, PREFIX, CodeGen(), CLASS_NAME)  # tensors in, a tuple out; no pytrees
