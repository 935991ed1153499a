"""The same model in Hugging Face, for comparison: eager, and a static cache with torch.compile in two modes. And the
table of all baselines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import StaticCache

from graft.base.timers import synchronize
from graft.bench.baselines.baseline import Task
from graft.bench.baselines.llama_cpp import LlamaCpp
from graft.bench.baselines.openvino import OpenVino
from graft.models.loaded import LoadedModel


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
    clock, device = Clock(), model.module.device
    EagerBaseline(model).generate([prompt] * batch, new_tokens, stopping_criteria=[clock])
    synchronize(device)
    return batch * (len(clock.times) - 1) / (clock.times[-1] - clock.times[0])


class EagerBaseline:
    """`generate` as it comes: greedy, dynamic cache, the model's own attention."""

    name = "hugging face eager"

    def __init__(self, model: LoadedModel) -> None:
        self.module: Any = model.module

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], new: int, **options: Any) -> list[list[int]]:
        """`new` tokens for each prompt; all prompts have one length. `options` go to Hugging Face."""
        ids = torch.tensor(prompts, device=self.module.device)  # [batch, prompt]
        result = self.module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            eos_token_id=-1,  # never comes, so every sequence runs to the end
            do_sample=False,
            pad_token_id=0,
            **options,
        )
        return result[:, ids.shape[1] :].tolist()


class CompiledBaseline:
    """A static cache and torch.compile: decode steps are compiled, the prompt runs eagerly, as in `generate`.

    `length`: tokens that the cache has room for. `mode`: of torch.compile.
    """

    def __init__(self, model: LoadedModel, length: int, mode: str | None = None, name: str = "compile") -> None:
        self.name = f"hugging face {name}"
        self.module: Any = model.module
        self.length = length
        self.cache: Any = None
        self.batch = 0
        self.step: Any = torch.compile(self.module, dynamic=False, mode=mode)

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        """As EagerBaseline. One cache a batch size: compiled code is bound to its tensors."""
        ids = torch.tensor(prompts, device=self.module.device)  # [batch, prompt]
        if self.cache is None or self.batch != len(prompts):
            self.cache = StaticCache(config=self.module.config, max_cache_len=self.length)
            self.batch = len(prompts)
        self.cache.reset()
        logits = self.module(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits
        tokens = [logits[:, -1].argmax(-1, keepdim=True)]  # [batch, 1] each
        for _ in range(new - 1):
            torch.compiler.cudagraph_mark_step_begin()  # the logits of the step before may be overwritten
            logits = self.step(tokens[-1], past_key_values=self.cache, use_cache=True).logits
            tokens.append(logits[:, -1].argmax(-1, keepdim=True))
        return torch.cat(tokens, dim=1).tolist()


def eager_baseline(task: Task) -> EagerBaseline:
    return EagerBaseline(task.model)


def compiled_baseline(task: Task) -> CompiledBaseline:
    """CUDA graphs are on where there is a GPU."""
    on_gpu = task.model.module.device.type == "cuda"
    return CompiledBaseline(task.model, task.length, "reduce-overhead" if on_gpu else None)


def autotuned_baseline(task: Task) -> CompiledBaseline:
    """Kernels by measurement; on a GPU with CUDA graphs."""
    return CompiledBaseline(task.model, task.length, "max-autotune", "autotune")


# by the name that --against takes; each is made for one cell
BASELINES: dict[str, Callable[[Task], Any]] = {
    "eager": eager_baseline,
    "compile": compiled_baseline,
    "autotune": autotuned_baseline,
    "llama.cpp": LlamaCpp,
    "openvino": OpenVino,
}
# what --peers takes: on a CPU max-autotune compiles for minutes and gives little
PEERS = {"cuda": ("eager", "compile", "autotune"), "cpu": ("eager", "compile", "llama.cpp", "openvino")}
