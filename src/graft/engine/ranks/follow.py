"""The side of every other rank: the steps that rank 0 tells it, on its own part of weights and cache."""

from __future__ import annotations

from collections.abc import Callable

import torch

from graft.dist.group import TorchGroup
from graft.dist.messages import COPY, COPY_STATE, SAVE, STOP, Messages, as_text
from graft.engine.engine import Engine
from graft.engine.kv.moves import Copy
from graft.engine.kv.tensors import copy_blocks
from graft.ops.layout import INPUTS


@torch.inference_mode()
def follow(engine: Engine, group: TorchGroup, save: Callable[[str], str]) -> None:
    """Until rank 0 says that nothing more will come. Logits are for rank 0 to read. save: writes this rank's part as
    it is told, and gives what is to be said of it."""
    messages, device = Messages(group), engine.tensors[0].device
    while True:
        kind, tensors = messages.receive()
        if kind == STOP:
            return
        if kind == COPY:
            copy_blocks(engine.tensors, [Copy(int(source), int(target)) for source, target in tensors[0].tolist()])
            continue
        if kind == COPY_STATE and engine.states is not None:
            engine.states.copy(*tensors[0].tolist())
            continue
        if kind == SAVE:
            group.said(save(as_text(tensors[0])))
            continue
        batch, slots = tensors[: len(INPUTS)], tensors[len(INPUTS) :]
        inputs = [t if one.on_host else t.to(device) for one, t in zip(INPUTS, batch, strict=True)]
        states = () if engine.states is None else engine.states.beside(slots[0].to(device))
        engine.graph(*inputs, *engine.tensors, *states)
