"""Why a transform matched where it did, and why it did not elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch.fx import GraphModule, Node

from graft.base.errors import UnknownTransform, UsageError
from graft.base.files import Progress
from graft.ir.nodes import module_path, source_line
from graft.ir.patterns.match import NearMiss
from graft.passes.base import Context, Stage
from graft.passes.config import PipelineConfig
from graft.passes.library.fix_functionalization import NAME as FIX
from graft.passes.pipeline import order_transforms, run_pipeline
from graft.passes.registry import TransformRegistry, origin_of
from graft.passes.report import MatchRecord, NumericCheck, TransformRecord
from graft.workbench.model import captured


@dataclass(frozen=True)
class ModelSite:
    """Where in the model something is: `layer` is the first number in the module's path."""

    layer: int | None
    module: str
    source: str
    node: str


@dataclass(frozen=True)
class ExplainedMatch:
    site: ModelSite
    pattern: str
    nodes: int
    numeric_check: NumericCheck | None
    proved: str = ""


@dataclass(frozen=True)
class ExplainedMiss:
    """`site` is the node that stopped the match which would have ended at `anchor`."""

    site: ModelSite
    anchor: str
    pattern: str
    reason: str
    matched: int
    size: int


@dataclass(frozen=True)
class Explanation:
    model: str
    transform: str
    status: str
    reason: str
    matches: tuple[ExplainedMatch, ...]
    near_misses: tuple[ExplainedMiss, ...]
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def by_layer(self) -> dict[int | None, list[ExplainedMatch]]:
        layers: dict[int | None, list[ExplainedMatch]] = {}
        for match in sorted(self.matches, key=lambda m: (m.site.layer is None, m.site.layer or 0)):
            layers.setdefault(match.site.layer, []).append(match)
        return layers

    def closest(self) -> list[ExplainedMiss]:
        """The nearest miss at each anchor: other patterns that stopped earlier there are left out."""
        best: dict[str, ExplainedMiss] = {}
        for miss in self.near_misses:
            known = best.get(miss.anchor)
            if known is None or miss.matched / miss.size > known.matched / known.size:
                best[miss.anchor] = miss
        return list(best.values())


def explain_model(
    name: str,
    transform: str,
    config: PipelineConfig,
    dtype: str = "auto",
    progress: Progress | None = None,
    *,
    trust_remote_code: bool = False,
) -> Explanation:
    """Captures a model, runs the pipeline up to `transform`, and explains what that one did."""
    check_listed(transform, config)
    model, gm = captured(name, dtype, progress, trust_remote_code=trust_remote_code)
    if config.transforms[transform].stage is Stage.INDUCTOR:
        run_pipeline(gm, config, Context(route="decoder", context_length=model.context))
        return explain_fix(gm, config, model.name)
    return explain_graph(gm, transform, config, Context(route="decoder", context_length=model.context), model.name)


def check_listed(transform: str, config: PipelineConfig) -> None:
    """An error for one that there is not, another for one that nothing lists."""
    if transform in config.transforms:
        return
    if transform in TransformRegistry.names():
        raise UsageError(
            f"{transform} (from {origin_of(transform)}) is registered, but nothing lists it, so it has no stage;"
            f" add transforms.{transform}.stage to the YAML beside it, or to a --config file"
        )
    raise UnknownTransform(transform, config.transforms)


def explain_graph(
    gm: GraphModule, transform: str, config: PipelineConfig, context: Context, name: str = ""
) -> Explanation:
    """Explains one transform on a captured graph, after those that come before it. Changes the graph."""
    earlier = order_transforms(config)
    earlier = earlier[: earlier.index(transform)]
    run_pipeline(gm, only(config, earlier), context)
    sites = {node.name: site_of(node) for node in gm.graph.nodes}
    off = not config.transforms[transform].enabled
    chosen = replace(config.transforms[transform], enabled=True)
    alone = replace(config, transforms={**only(config, ()).transforms, transform: chosen})
    record = run_pipeline(gm, alone, context).transforms[transform]
    sites = {node.name: site_of(node) for node in gm.graph.nodes} | sites
    note = "it is off in this configuration; this is what it would do" if off else ""
    return describe(name, record, sites, note)


def explain_fix(gm: GraphModule, config: PipelineConfig, name: str = "") -> Explanation:
    """What fix_functionalization does where Inductor compiles this graph."""
    from graft.workbench.post_grad import fix_on_post_grad  # Inductor, where it is used

    off = not config.transforms[FIX].enabled
    note = "it is off in this configuration; this is what it would do" if off else ""
    record = fix_on_post_grad(gm, config).record
    sites = {m.name: ModelSite(layer_of(m.module), m.module, source_in(m.anchor), m.name) for m in record.matches}
    return describe(name, record, sites, note)


def source_in(anchor: str) -> str:
    """`%f (model.layers.0, model.py:268)` → `model.py:268`."""
    found = re.search(r"(\S+\.py:\d+)\)$", anchor)
    return found[1] if found else ""


def only(config: PipelineConfig, names: Any) -> PipelineConfig:
    """The same configuration with every other transform off."""
    kept = {n: replace(s, enabled=s.enabled and n in names) for n, s in config.transforms.items()}
    return replace(config, transforms=kept)


def describe(model: str, record: TransformRecord, sites: Mapping[str, ModelSite], note: str) -> Explanation:
    matches = tuple(
        ExplainedMatch(
            match_site(match, sites), match.pattern, len(match.replaced), match.numeric_check, match.proved
        )
        for match in record.matches
    )
    misses = tuple(
        ExplainedMiss(miss_site(miss, sites), miss.anchor, miss.pattern, miss.reason, miss.matched, miss.size)
        for miss in record.near_misses
    )
    return Explanation(model, record.name, record.status, record.reason, matches, misses, note)


def match_site(match: MatchRecord, sites: Mapping[str, ModelSite]) -> ModelSite:
    return sites.get(match.name, ModelSite(layer_of(match.module), match.module, "", match.name))


def miss_site(miss: NearMiss, sites: Mapping[str, ModelSite]) -> ModelSite:
    """Of the node that stopped it; a weight has no line of its own, so it gets the anchor's."""
    nowhere = ModelSite(None, "", "", miss.stopped_at)
    site, anchor = sites.get(miss.stopped_at, nowhere), sites.get(miss.name, nowhere)
    return site if site.source else replace(anchor, node=site.node)


def site_of(node: Node) -> ModelSite:
    path = module_path(node)
    return ModelSite(layer_of(path), path, source_line(node), node.name)


def layer_of(path: str) -> int | None:
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", path)
    return int(found[1]) if found else None
