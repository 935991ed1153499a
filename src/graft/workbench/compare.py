"""The same model in plain Hugging Face eager, timed for comparison."""

from __future__ import annotations

import time
from typing import Any

import torch

from graft.models.load import LoadedModel


class Clock:
    """A stopping criterion that never stops and notes when each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:  # noqa: ARG002
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@torch.inference_mode()
def hugging_face_rate(model: LoadedModel, prompt: list[int], new_tokens: int, batch: int = 1) -> float:
    """Tokens per second of `generate` after its first token: greedy, dynamic cache, the model's own attention."""
    if new_tokens < 2:
        return 0.0
    device = next(model.module.parameters()).device
    ids = torch.tensor([prompt] * batch, device=device)
    clock = Clock()
    generate: Any = model.module.generate
    generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        eos_token_id=-1,  # never comes, so every sequence runs to the end
        do_sample=False,
        stopping_criteria=[clock],
        pad_token_id=0,
    )
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return batch * (len(clock.times) - 1) / (clock.times[-1] - clock.times[0])
