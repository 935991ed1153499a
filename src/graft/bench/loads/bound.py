"""The most tokens a second that a machine could give under a load, by what it does when it does one thing.

A request takes all matrices for its tokens at the rate of a large GEMM, the attention of its prompt at that rate in
16 bits, and for every new token the keys and values before it once at the bandwidth. Weights are read once a step, by
all requests of it together: what they take is counted where it is more than their arithmetic. Nothing else takes
time, and no step is less than full.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graft.bench.limits.roofline import Roofline, float8_rate, measure_roofline
from graft.bench.limits.traffic import attention_flops, matrix_flops, weight_bytes
from graft.bench.loads.spread import Load
from graft.bench.ranks import devices_of, kept_bytes, quantized_bytes
from graft.engine.llm import LLM


@dataclass(frozen=True)
class MachineRates:
    """matrix_flops: a second, of weights in the format that the engine has; attention_flops: in the model's dtype."""

    matrix_flops: float
    attention_flops: float
    read_bytes: float


def machine_rates(llm: LLM) -> MachineRates:
    """Measured, in about a second."""
    found: Roofline = measure_roofline(llm.device, llm.model.module.dtype)
    rate = 1e12 * found.matrix_tflops
    fp8 = llm.device.type == "cuda" and llm.quantized is not None and llm.quantized.format == "fp8"
    return MachineRates(float8_rate(llm.device) if fp8 else rate, rate, 1e9 * found.read_gb_per_s)


@torch.inference_mode()
def load_bound(llm: LLM, load: Load, rates: MachineRates) -> float:
    """New tokens a second."""
    module, batch = llm.model.module, min(load.requests, llm.engine.scheduler.max_num_seqs)
    prompt = matrix_flops(module, load.isl, 1) / rates.matrix_flops
    prompt += attention_flops(module, load.isl) / rates.attention_flops
    quantized = quantized_bytes(llm, batch)
    weights = weight_bytes(module, batch) if quantized is None else quantized
    arithmetic = matrix_flops(module, 1, 1) / rates.matrix_flops
    read = kept_bytes(llm, load.isl + load.osl / 2) / rates.read_bytes
    token = max(arithmetic, weights / batch / rates.read_bytes) + read
    return devices_of(llm) * load.osl / (prompt + (load.osl - 1) * token)
