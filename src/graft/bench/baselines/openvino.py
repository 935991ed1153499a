"""OpenVINO on the same Hugging Face module: traced by its own converter, keys and values kept as its state.

`openvino` alone is needed. In front of each attention stand a gather by beam and a concatenation, as in the models
that its own exporter makes.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from graft.bench.baselines.baseline import Task, need
from graft.bench.limits.traffic import cache_bytes, head_size, weight_bytes

INPUTS = ("ids", "mask", "positions", "beams")
HIDDEN = -3.0e38  # of float32: what a query may not see


class StepModule(nn.Module):
    """The module as a function of tokens and of all keys and values so far, which it returns longer by the tokens."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(
        self, ids: Tensor, mask: Tensor, positions: Tensor, beams: Tensor, *past: Tensor
    ) -> tuple[Tensor, ...]:
        """ids, positions: [batch, tokens]; mask: [batch, 1, tokens, all]; past: [batch, heads, before, head]."""
        cache: Any = DynamicCache(config=self.module.config)
        for index, layer in enumerate(cache.layers):
            keys, values = past[2 * index], past[2 * index + 1]
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys.index_select(0, beams), values.index_select(0, beams)
        out = self.module(
            input_ids=ids,
            attention_mask=mask.to(self.module.dtype),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return (out.logits[:, -1].float(), *(t for layer in cache.layers for t in (layer.keys, layer.values)))


class OpenVino:
    name = "openvino"

    def __init__(self, task: Task) -> None:
        self.task = task
        self.request: Any = None
        self.weights = 0.0
        self.cache_share = 1.0  # bytes of its cache over those of the module's dtype

    def open(self) -> Any:
        need("openvino", "openvino", self.name)
        import openvino  # pyrefly: ignore

        module: Any = self.task.model.module
        options: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY"}
        if self.task.threads is not None:
            options["INFERENCE_NUM_THREADS"] = self.task.threads
        compiled = openvino.Core().compile_model(stateful(module), "CPU", options)
        self.request = compiled.create_infer_request()
        item = module.dtype.itemsize
        precision = compiled.get_property("INFERENCE_PRECISION_HINT").size  # of the weights too: float16, bfloat16 …
        self.weights = weight_bytes(module, self.task.batch) / item * precision
        self.cache_share = self.request.query_state()[0].state.element_type.size / item
        return self.request

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        request = self.request or self.open()
        request.reset_state()
        ids, past, tokens = np.array(prompts), 0, []  # [batch, prompt]
        for _ in range(new):
            tokens.append(self.step(ids, past))
            past += ids.shape[1]
            ids = tokens[-1][:, None]
        return np.stack(tokens, 1).tolist()

    def step(self, ids: np.ndarray, past: int) -> np.ndarray:
        """The likeliest token of each sequence, [batch]; `past` tokens of each are in the state."""
        batch, count = ids.shape
        own = np.arange(past, past + count)
        mask = np.where(np.arange(past + count)[None, :] <= own[:, None], 0, HIDDEN).astype(np.float32)
        given = {
            "ids": ids,
            "mask": np.broadcast_to(mask, (batch, 1, *mask.shape)),
            "positions": np.broadcast_to(own, (batch, count)),
            "beams": np.arange(batch),
        }
        self.request.infer(given)
        return self.request.get_output_tensor(0).data.argmax(-1)

    def step_bytes(self, batch: int, tokens: float) -> float:
        return self.weights + batch * cache_bytes(self.task.model.module, tokens) * self.cache_share

    def close(self) -> None:
        self.request = None


def stateful(module: Any) -> Any:
    """OpenVINO's model of a module; what comes in as past and goes out longer has become state."""
    import openvino  # pyrefly: ignore
    from openvino.passes import MakeStateful, Manager  # pyrefly: ignore

    config, batch, count, before = module.config, 2, 3, 5  # traced with these; the converter makes them variable
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    parts = 2 * config.num_hidden_layers
    past = [torch.zeros(batch, heads, before, head_size(config), dtype=module.dtype) for _ in range(parts)]
    example = (
        torch.zeros(batch, count, dtype=torch.long),
        torch.zeros(batch, 1, count, before + count),
        torch.arange(before, before + count).repeat(batch, 1),
        torch.arange(batch),
        *past,
    )
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", torch.jit.TracerWarning
        )  # of branches that the example takes as any step does
        model = openvino.convert_model(StepModule(module).eval(), example_input=example)
    names = [*INPUTS, *(f"past.{i}" for i in range(parts))]
    for port, name in zip(model.inputs, names, strict=True):
        port.get_tensor().set_names({name})
        if name not in INPUTS:
            port.get_node().set_partial_shape(openvino.PartialShape([-1, heads, -1, head_size(config)]))
    for index, port in enumerate(model.outputs[1:]):
        port.get_tensor().set_names({f"present.{index}"})
    model.validate_nodes_and_infer_types()
    passes = Manager()
    passes.register_pass(MakeStateful({f"past.{i}": f"present.{i}" for i in range(parts)}))
    passes.run_passes(model)
    return model
