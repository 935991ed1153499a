"""How far a float8 cache moves the logits: one pass over a few tokens, beside the same with keys and values as they
are computed."""

from __future__ import annotations

import torch
from torch import Tensor

from graft.engine.engine import Engine
from graft.engine.kv.tensors import allocate, shapes_like
from graft.engine.setup.self_check import PROMPT, STEPS, some_tokens
from graft.models.loaded import LoadedModel
from graft.ops.layout import HostBatch, pack


def cache_error_text(engine: Engine, model: LoadedModel, backend: str) -> str:
    """For the report."""
    own = str(engine.tensors[0].dtype).removeprefix("torch.")
    if backend == "inductor":
        return f"logits over the {own} cache: not compared, because Inductor compiled the graph for that one alone"
    wide = model.module.dtype
    tokens = some_tokens(model, min(PROMPT + STEPS, engine.manager.block_size, model.context))
    error, largest = cache_error(engine, tokens, wide)
    return (
        f"logits over the {own} cache are {error:.1e} from those over one in {str(wide).removeprefix('torch.')} (root"
        f" mean square of {len(tokens)} tokens; the largest difference is {largest:.2g})"
    )


@torch.inference_mode()
def cache_error(engine: Engine, tokens: list[int], wide: torch.dtype) -> tuple[float, float]:
    """The root mean square of the difference, in that of the logits, and the largest difference."""
    own, exact = (logits_of(engine, tokens, dtype).double() for dtype in (engine.tensors[0].dtype, wide))
    return float((own - exact).norm() / exact.norm()), float((own - exact).abs().max())


def logits_of(engine: Engine, tokens: list[int], dtype: torch.dtype) -> Tensor:
    """[tokens, vocab], with keys and values in a cache of their own."""
    size, device = engine.manager.block_size, engine.tensors[0].device
    layers = shapes_like(engine.tensors, dtype)
    host = HostBatch()
    host.add(tokens, 0, [0], size)
    host.logits_indices = list(range(len(tokens)))
    caches = (*allocate(layers, 1, size, device), *(() if engine.states is None else engine.states.aside(1)))
    (logits,) = engine.graph(*pack(host, device).inputs(), *caches)  # [1, tokens, vocab]
    return logits[0]
