"""Blocks of experts as Hugging Face has them, tokens for them, and the pipeline with fuse_moe alone."""

from __future__ import annotations

import torch
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from graft.ir.io.text import graph_text
from graft.ir.trace import export_graph
from graft.passes.config import load_config
from graft.passes.pipeline import run_pipeline

D, F, E, K = 16, 24, 6, 2
BLOCKS = {"mixtral": (MixtralSparseMoeBlock, {}), "qwen3": (Qwen3MoeSparseMoeBlock, {"norm_topk_prob": True})}
BLOCKS["qwen3 not normalized"] = (Qwen3MoeSparseMoeBlock, {"norm_topk_prob": False})


def block(kind="mixtral", experts="grouped_mm", dtype=torch.float32, e=E, k=K, activation="silu"):
    make, options = BLOCKS[kind]
    config = (MixtralConfig if make is MixtralSparseMoeBlock else Qwen3MoeConfig)(
        hidden_size=D, intermediate_size=F, moe_intermediate_size=F, num_local_experts=e, num_experts=e,
        num_experts_per_tok=k, hidden_act=activation, **options,
    )  # fmt: skip
    config._experts_implementation = experts
    module = make(config).eval().requires_grad_(False)
    g = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=g) * parameter.shape[-1] ** -0.5)
    return module.to(dtype)


def tokens(n=7, dtype=torch.float32, seed=1):
    return torch.randn(1, n, D, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fuse(module, *args, dynamic=False, names=("fuse_moe",)):
    shapes = tuple({1: torch.export.Dim.DYNAMIC} for _ in args) if dynamic else None
    gm = export_graph(module, args, dynamic_shapes=shapes)
    before = graph_text(gm.graph)
    config = load_config({"transforms": {n: {"enabled": n in names} for n in load_config().transforms}})
    return gm, run_pipeline(gm, config).transforms["fuse_moe"], before
