"""A model on several ranks, as threads of one process: the graph of each rank, and what they give together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.fx import GraphModule

from conftest import graph_of
from graft.ir.edit import second_module
from graft.models.load import load_model
from graft.ops.ranks import run_as_ranks
from graft.passes.base import Context, Stage
from graft.passes.config import load_config, shard_sets
from graft.passes.pipeline import run_pipeline
from graft.passes.report import Report, TransformRecord

NAME = "shard_tensor_parallel"


@cache
def whole_graph(family: str) -> GraphModule:
    """Of the tiny model in float32 with its named ops; biases and weights of norms are not all zeros or ones."""
    module = load_model(f"tiny-{family}", dtype="float32", device="cpu").module
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    gm = graph_of(module)
    run_stages(gm, (Stage.MATCH,))
    return gm


def run_stages(gm: GraphModule, stages: Sequence[Stage], *sets: str) -> Report:
    config = load_config(None, sets=sets)
    chosen = {name: settings for name, settings in config.transforms.items() if settings.stage in stages}
    return run_pipeline(gm, dataclasses.replace(config, transforms=chosen), Context(route="decoder"))


def sharded(
    gm: GraphModule, rank: int, world: int, *sets: str, stages: Sequence[Stage] = (Stage.SHARD, Stage.FUSE)
) -> tuple[GraphModule, Report]:
    """The part of one rank; the graph that is given stays as it is."""
    part = second_module(gm)
    return part, run_stages(part, stages, *shard_sets(rank, world), *sets)


def parts_of(gm: GraphModule, world: int, *sets: str) -> tuple[list[GraphModule], TransformRecord]:
    """Of all ranks, and the record of the first."""
    made = [sharded(gm, rank, world, *sets) for rank in range(world)]
    return [part for part, _ in made], made[0][1].transforms[NAME]


def some_tokens() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 128, (2, 7), generator=torch.Generator().manual_seed(5))
    return ids, torch.arange(7).expand(2, 7)


def logits_of(gm: GraphModule) -> Tensor:
    with torch.no_grad():
        return gm(*some_tokens())[0]


def together(parts: Sequence[GraphModule]) -> list[Tensor]:
    """What each rank gives."""

    def of(part: GraphModule) -> Callable[[], Tensor]:
        return lambda: logits_of(part)

    return run_as_ranks([of(part) for part in parts])
