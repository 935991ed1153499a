"""Small decoder blocks and the configuration that runs the decode fusions on a CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

<<<<<<< HEAD
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule

from graft.graph.nodes import calls
from graft.graph.text import target_text
from graft.graph.trace import export_graph
from graft.transforms.base import Context
from graft.transforms.config import PipelineConfig, load_config
from graft.transforms.pipeline import run_pipeline
from graft.transforms.registry import TransformRegistry, load_all
from graft.transforms.report import Report

load_all()
# every transform that can be told its devices
DECODE = [
    name
    for name in TransformRegistry.names()
    if "devices" in {field.name for field in dataclasses.fields(TransformRegistry.get(name).get_config_class())}
]
NAMED = ("fuse_rms_norm", "fuse_swiglu", "fuse_add_rms_norm", "fuse_rope")  # what models spell out
D = 16
=======
import graft
from conftest import tiny
from graft.kvcache.events import CacheView
from graft.kvcache.tensors import LayerShape
from graft.runtime.build import build_engine
from graft.runtime.options import EngineOptions
>>>>>>> w6-runtime


def forced(**more: Any) -> dict[str, Any]:
    """A configuration mapping in which the decode fusions run on a CPU too."""
    return {"transforms": {name: {"devices": ["cpu"]} for name in DECODE}, **more}


def only(*names: str, verify: str = "matches", options: dict[str, Any] | None = None) -> PipelineConfig:
    settings = {name: {"enabled": name in names} for name in TransformRegistry.names()}
    for name in DECODE:
        settings[name] |= {"devices": ["cpu"]} if name in names else {}
        settings[name] |= (options or {}).get(name, {})
    return load_config({"verify": verify, "transforms": settings})


<<<<<<< HEAD
def transformed(
    module: nn.Module, args: tuple[Any, ...], *names: str, dynamic_shapes: Any = None, options: Any = None
) -> tuple[GraphModule, Report]:
    """The graph after the named transforms, each match proven, as the engine would run them."""
    gm = export_graph(module, args, dynamic_shapes=dynamic_shapes)
    report = run_pipeline(gm, only(*names, options=options), Context(route="decoder", context_length=64))
    return gm, report


def targets(gm: GraphModule) -> list[str]:
    return [target_text(node.target) for node in calls(gm.graph)]


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    h = x.float()
    return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def x_of(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Block(nn.Module):
    """Two residual steps of a decoder: a mixer that stands for attention, and a gated MLP. `bias` of the products."""

    def __init__(self, dtype: torch.dtype = torch.float32, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        make = lambda n, k: nn.Linear(k, n, bias=bias).to(dtype)  # noqa: E731
        self.qkv, self.o, self.gate_up, self.down = make(D, D), make(D, D), make(4 * D, D), make(D, 2 * D)
        self.g1, self.g2 = (nn.Parameter(torch.rand(D).to(dtype) + 0.5) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.o(self.qkv(norm(x, self.g1)).sin())
        gate, up = self.gate_up(norm(x, self.g2)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)
=======
def random_params(rng: random.Random, plain: bool = False) -> graft.SamplingParams:
    """plain: what a recording chooses by itself."""
    common: dict[str, Any] = {"max_tokens": rng.choice([1, 2, 5, 9, 20, 40]), "ignore_eos": rng.random() < 0.7}
    if rng.random() < 0.3:
        common["stop_token_ids"] = tuple(rng.sample(range(128), 4))
    if not plain and rng.random() < 0.15:
        common |= {"repetition_penalty": 1.3, "presence_penalty": 0.4}
    if not plain and rng.random() < 0.15:
        common["logprobs"] = rng.randrange(4)
    if not plain and rng.random() < 0.15:
        common["min_tokens"] = min(3, common["max_tokens"])
    if rng.random() < 0.5:
        return graft.SamplingParams(**common)
    return graft.SamplingParams(
        **common,
        n=1 if plain else rng.choice([1, 1, 1, 2, 3]),
        temperature=rng.uniform(0.3, 1.5),
        top_k=rng.choice([0, 0, 5, 40]),
        top_p=rng.choice([1.0, 1.0, 0.9]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        seed=rng.randrange(1000),
    )


def traffic(rng, count, plain):
    """(steps before it, prompt, parameters, priority)."""
    prefixes = [[rng.randrange(3, 128) for _ in range(rng.choice([16, 33, 48]))] for _ in range(3)]
    for _ in range(count):
        tail = [rng.randrange(3, 128) for _ in range(rng.randint(1, 20))]
        prompt = (rng.choice(prefixes) if rng.random() < 0.6 else []) + tail
        pause = rng.choice([0, 0, 0, 1, 6, 25])
        yield pause, prompt, random_params(rng, plain), rng.choice([0, 0, 0, -1, 1])


def run(llm, seed, count, plain=False, abort=False):
    """All requests of the traffic, with what can be checked on the way checked."""
    requests, view, rng = [], CacheView(), random.Random(seed + 1)

    def step():
        llm.engine.step()
        if rng.random() < 0.2:
            llm.engine.manager.check()
        for event in llm.kv_cache_events():
            view.apply(event)
        if abort and requests and rng.random() < 0.1:
            llm.engine.abort([rng.choice([r for r in requests if r.finish_reason is None] or requests)])

    for pause, prompt, params, priority in traffic(random.Random(seed), count, plain):
        for _ in range(pause):
            step()
        requests.append(llm.submit(prompt, params, priority=priority))
    while not llm.engine.idle:
        step()
    manager = llm.engine.manager
    manager.check()
    assert manager.available == manager.blocks and not manager.tables
    assert set(view.blocks) == set(manager.stored)
    return [one for request in requests for one in request.family]
>>>>>>> w6-runtime
