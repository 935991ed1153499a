"""Engines that record decode steps on a CPU, and the same ones that do not."""

from __future__ import annotations

import copy
import random
from functools import cache
from typing import Any

import graft
from conftest import tiny
from graft.engine.kv.states import bytes_per_slot
from graft.engine.kv.tensors import shapes_like
from graft.engine.kv.view import CacheView
from graft.engine.options import EngineOptions
from graft.engine.setup.build import build_engine


@cache
def captured(family: str) -> graft.LLM:
    return graft.LLM(tiny(family), backend="eager")


def engine(family: str, record: bool, blocks: int | None = None, **options: Any) -> graft.LLM:
    """The same graph with an engine of its own; `record` has its decode steps captured, as direct calls."""
    llm = captured(family)
    whole = llm.engine
    layers = shapes_like(whole.tensors)
    if blocks is not None:
        options["kv_cache_memory"] = blocks * whole.cache_bytes // whole.manager.blocks
        if whole.states is not None:  # which may take half of it
            most = options.get("max_num_seqs", whole.states.slots)
            options["kv_cache_memory"] += most * bytes_per_slot(whole.states.shapes)
    other = copy.copy(llm)
    size = whole.manager.block_size
    other.engine, other.size = build_engine(
        whole.graph,
        llm.model,
        layers,
        size,
        EngineOptions(**options),
        llm.device,
        content=llm.cache.content,
        states=llm.cache.states,
        record=record,
    )
    assert blocks is None or other.engine.manager.blocks == blocks
    return other


def random_params(rng: random.Random, plain: bool = False) -> graft.SamplingParams:
    """plain: what a capture chooses by itself."""
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
        requests.append(llm.engine.add(prompt, params, priority=priority))
    while not llm.engine.idle:
        step()
    manager = llm.engine.manager
    manager.check()
    assert manager.available == manager.blocks and not manager.tables
    assert set(view.blocks) == set(manager.stored)
    return [one for request in requests for one in request.family]
