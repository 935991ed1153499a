"""llama.cpp on the model's own GGUF file, through llama-cpp-python's low-level functions.

The high-level class keeps the logits of every token and decodes one sequence at a time; here a batch is one call of
llama_decode with a token of each sequence, as llama.cpp's own server does it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graft.base.errors import PeerNotRun
from graft.bench.baselines.baseline import Task, need
from graft.bench.limits.traffic import head_size, windows
from graft.models.embedded import embedded_gguf
from graft.models.registry import entries

PAGE = 256  # tokens: llama.cpp fills the cache of a sequence up to a multiple
CACHE_ITEM = 2  # bytes: keys and values are float16, whatever the weights are


def gguf_file(source: str) -> Path:
    """The GGUF file that a model was loaded from."""
    entry = entries().get(source)
    if entry is not None and entry.kind == "embedded":
        return embedded_gguf(entry.name, entry.settings)
    if source.endswith(".gguf"):
        return Path(source)
    raise PeerNotRun("no GGUF file; llama.cpp runs models that were loaded from one")


class LlamaCpp:
    name = "llama.cpp"

    def __init__(self, task: Task) -> None:
        self.task = task
        self.api: Any = None
        self.model: Any = None
        self.context: Any = None
        self.weights = 0.0
        self.vocabulary = 0

    def open(self) -> None:
        need("llama_cpp", "llama-cpp-python", self.name)
        file = gguf_file(self.task.source)
        import llama_cpp  # pyrefly: ignore

        self.api = api = llama_cpp
        self.silence = api.llama_log_callback(lambda *_: None)  # kept: C calls it as long as the process lives
        api.llama_log_set(self.silence, ctypes.c_void_p(0))
        api.llama_backend_init()
        params = api.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = api.llama_model_load_from_file(os.fsencode(file), params)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {file}")
        self.vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.context = api.llama_init_from_model(self.model, self.options())
        if not self.context:
            raise RuntimeError(f"llama.cpp made no context for {self.task.batch} x {self.task.length} tokens")
        self.weights = weight_bytes(file)

    def options(self) -> Any:
        task, options = self.task, self.api.llama_context_default_params()
        options.n_ctx = task.batch * -(-task.length // PAGE) * PAGE
        options.n_batch = max(task.batch * task.length, options.n_ubatch)
        options.n_seq_max = task.batch
        if task.threads is not None:
            options.n_threads = options.n_threads_batch = task.threads
        return options

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        if self.context is None:
            self.open()
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        batch = self.api.llama_batch_init(sum(map(len, prompts)), 0, 1)
        try:
            tokens = [[token] for token in self.decode(batch, prompts, 0)]
            for past in range(len(prompts[0]), len(prompts[0]) + new - 1):
                for row, token in zip(tokens, self.decode(batch, [row[-1:] for row in tokens], past), strict=True):
                    row.append(token)
        finally:
            self.api.llama_batch_free(batch)
        return tokens

    def decode(self, batch: Any, rows: Sequence[Sequence[int]], past: int) -> list[int]:
        """The likeliest token after each row; `past` tokens of each are in the cache."""
        last, at = [], 0
        for sequence, row in enumerate(rows):
            for index, token in enumerate(row):
                batch.token[at], batch.pos[at] = token, past + index
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
                batch.logits[at] = index == len(row) - 1
                at += 1
            last.append(at - 1)
        batch.n_tokens = at
        code = self.api.llama_decode(self.context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code} for {at} tokens")
        found = (self.api.llama_get_logits_ith(self.context, index) for index in last)
        return [int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax()) for logits in found]

    def step_bytes(self, batch: int, tokens: float) -> float:
        module = self.task.model.module
        config: Any = module.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        seen = sum(min(tokens, window) for window in windows(module))
        return self.weights + batch * seen * 2 * heads * head_size(config) * CACHE_ITEM

    def close(self) -> None:
        if self.context:
            self.api.llama_free(self.context)
        if self.model:
            self.api.llama_model_free(self.model)
        self.context = self.model = None


def weight_bytes(file: Path) -> float:
    """What a step reads of a file: all tensors; of the table a row alone, unless it is the output head as well."""
    from gguf import GGUFReader

    sizes = {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(file).tensors}
    table = sizes.get("token_embd.weight", 0) if "output.weight" in sizes else 0
    return float(sum(sizes.values()) - table)
