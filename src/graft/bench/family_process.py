"""The process of one family: builds its model, measures it, and prints one JSON document."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from graft.base.progress import CAPTURE
from graft.bench.bench import bench, cache_need
from graft.bench.family_turns import wait_for_turn
from graft.bench.limits.roofline import measure_roofline
from graft.bench.phases import PhaseClock
from graft.bench.plan import BenchPlan
from graft.bench.sizes import SizedModel, sized
from graft.bench.threads import use_threads
from graft.engine.llm import LLM
from graft.engine.setup.stages import settings_for
from graft.models.load import build_random, load_model
from graft.models.loaded import LoadedModel
from graft.models.places import resolve_device, resolve_dtype
from graft.models.registry import entries


def main() -> None:
    asked = json.loads(sys.argv[1])
    print(json.dumps(measure_family(asked, wait_for_turn)))


def measure_family(asked: Mapping[str, Any], ready: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """ready: called between building and measuring."""
    given = asked["bench"]
    plan = BenchPlan(
        tuple(given["batches"]), tuple(given["prompts"]), given["new"], given["repeats"], (), None, given["threads"]
    )
    with use_threads(plan.threads):
        loaded, size = load(asked)
        clock = PhaseClock()
        llm = LLM(
            loaded, config=settings_for(loaded, None, None, sets=tuple(asked["sets"])), backend=asked["backend"],
            quantize=asked["quantize"], progress=clock, keep_weights=False,
            max_num_seqs=max(plan.batches), kv_cache_memory=cache_need(loaded, plan),
        )  # fmt: skip
        built = clock.since(CAPTURE)
        ready()
        roofline = measure_roofline(llm.device, loaded.module.dtype)
        found = bench(llm, plan, built, None, roofline)
    about = {"layers": loaded.layers, "layers_of": loaded.layers, "weight_bytes": None}
    if size is not None:
        about |= {"layers_of": size.of, "weight_bytes": size.bytes}
    return {"bench": json.loads(found.to_json()), **about}


def load(asked: Mapping[str, Any]) -> tuple[LoadedModel, SizedModel | None]:
    """A registry model, cut where it is too large; one with weights of its own as it is."""
    device, entry = resolve_device(asked["device"]), entries()[asked["model"]]
    if entry.kind != "random":
        return load_model(entry.name, dtype=asked["dtype"], device=asked["device"]), None
    dtype = resolve_dtype(asked["dtype"], device, torch.bfloat16)
    size = sized(entry, dtype, asked["weights"])
    return build_random(size.entry, dtype, device), size
