"""Tiny decoders with many layers, and graphs as data whose nodes and storages are numbered as they appear."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch.fx import GraphModule

from conftest import tiny
from graft.capture.layer_entries import rewritten, with_bytes
from graft.ir.io.serial import graph_to_json

OF_EACH = ("layer_types", "mlp_layer_types", "no_rope_layers")
COUNTS = ("num_hidden_layers", "n_layer")


def deep(family: str, layers: int = 12, **settings: Any) -> Any:
    """A tiny model of the family with more layers; what its configuration says of each is said over and over."""
    model = tiny(family).module
    config = model.config.to_dict()
    count = model.config.num_hidden_layers
    for key, value in config.items():
        if key in OF_EACH and isinstance(value, list) and len(value) == count:
            config[key] = (value * layers)[:layers]
    config |= {key: layers for key in COUNTS if key in config} | settings
    torch.manual_seed(0)
    made = type(model)(type(model.config).from_dict(config)).eval()
    assert made.config.num_hidden_layers == layers
    return made


def data_of(gm: GraphModule) -> dict[str, Any]:
    return json.loads(graph_to_json(gm, exact=True))


def numbered(data: dict[str, Any]) -> dict[str, Any]:
    """What two graphs have alike when they differ in names at most."""
    names = {entry["name"]: f"n{number}" for number, entry in enumerate(data["nodes"])}
    sizes = [{symbol["name"]: first + 2 * at for at, symbol in enumerate(data["symbols"])} for first in (11, 1_000)]
    found: dict[int, int] = {}
    for entry in data["nodes"]:
        for tensor in json.dumps(entry.get("val")).split('"storage": ')[1:]:
            found.setdefault(int(tensor.partition("}")[0]), len(found))
    nodes = [with_bytes(rewritten(e, names[e["name"]], names, found), sizes) for e in data["nodes"]]
    return {**{key: data[key] for key in ("state", "symbols", "nesting")}, "nodes": nodes}
