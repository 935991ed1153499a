"""What is different between two runs: what they were made of, what each transform did, and the graphs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from graft.base.errors import DumpError, RunMismatch, TransformOff, UnknownTransform
from graft.ir.facts import layer_of
from graft.ir.patterns.match import NearMiss
from graft.passes.report import TransformRecord
from graft.workbench.diff import Detail, GraphDiff, diff_graphs
from graft.workbench.layers import ranges
from graft.workbench.runs import StoredRun

ABSENT = "absent"


@dataclass(frozen=True)
class TransformDiff:
    """One transform in two runs. Sites are module paths, those of equal layers as one: `layers.*.mlp × 30`."""

    name: str
    status: tuple[str, str]
    matches: tuple[int, int]
    near_misses: tuple[int, int]
    lost: tuple[str, ...] = ()  # sites that matched before
    gained: tuple[str, ...] = ()
    new_misses: tuple[str, ...] = ()  # site and reason
    gone_misses: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        pairs = (self.status, self.matches, self.near_misses)
        return any(a != b for a, b in pairs) or bool(self.lost or self.gained or self.new_misses or self.gone_misses)


@dataclass(frozen=True)
class RunDiff:
    """`graph` is that of the last graphs, or of those after `transform`; None where one run has none there."""

    before: str
    after: str
    made_of: tuple[Detail, ...]  # model, versions, dtype, configuration
    transforms: tuple[TransformDiff, ...]  # those that differ
    graph: GraphDiff | None
    transform: str = ""
    note: str = ""

    def __bool__(self) -> bool:
        return bool(self.transforms or self.graph or self.note)


def diff_transform(run: StoredRun, transform: str) -> GraphDiff:
    """What a transform did to the graph."""
    before, after = run.around(transform)
    return diff_graphs(before.graph().graph, after.graph().graph)


def diff_runs(before: StoredRun, after: StoredRun, transform: str = "", *, strict: bool = False) -> RunDiff:
    """transform: only this one, and the graphs after it. strict: two models are an error, not a note."""
    made_of = manifest_changes(before, after)
    if strict and before.manifest.model != after.manifest.model:
        raise RunMismatch(
            f"{before.folder} (a run of {before.manifest.model})", f"{after.folder} (of {after.manifest.model})"
        )
    names = dict.fromkeys((*before.report.transforms, *after.report.transforms))
    if transform and transform not in names:
        raise UnknownTransform(transform, names, f"{before.folder} and {after.folder}")
    records = [
        compare_records(name, before.report.transforms.get(name), after.report.transforms.get(name))
        for name in names
        if transform in ("", name)
    ]
    graph, note = None, ""
    try:
        steps = (
            (before.after(transform), after.after(transform)) if transform else (before.steps[-1], after.steps[-1])
        )
        graph = diff_graphs(steps[0].graph().graph, steps[1].graph().graph)
    except (DumpError, TransformOff, UnknownTransform) as error:
        if not transform:
            raise
        note = str(error)
    folders = str(before.folder), str(after.folder)
    return RunDiff(*folders, made_of, tuple(r for r in records if r), graph, transform, note)


def manifest_changes(before: StoredRun, after: StoredRun) -> tuple[Detail, ...]:
    old, new = before.manifest, after.manifest
    pairs: list[tuple[str, Any, Any]] = [
        (name, getattr(old, name), getattr(new, name)) for name in ("model", "dtype", "device", "route")
    ]
    for left, right in ((old.versions, new.versions), (old.config, new.config)):
        pairs += [(key, left.get(key, ABSENT), right.get(key, ABSENT)) for key in dict.fromkeys((*left, *right))]
    return tuple(Detail(what, str(here), str(there)) for what, here, there in pairs if here != there)


def compare_records(name: str, old: TransformRecord | None, new: TransformRecord | None) -> TransformDiff:
    records = (old, new)
    matched = [Counter(m.module or "the root" for m in r.matches) if r else Counter() for r in records]
    missed = [Counter(miss_text(m) for m in r.near_misses) if r else Counter() for r in records]
    return TransformDiff(
        name,
        (old.status if old else ABSENT, new.status if new else ABSENT),
        (matched[0].total(), matched[1].total()),
        (missed[0].total(), missed[1].total()),
        folded(matched[0] - matched[1]),
        folded(matched[1] - matched[0]),
        folded(missed[1] - missed[0]),
        folded(missed[0] - missed[1]),
    )


def miss_text(miss: NearMiss) -> str:
    """Site and reason without the names of nodes, which other runs number in another way."""
    return f"{miss.module}: {nameless(miss.reason)}"


def nameless(reason: str) -> str:
    return re.sub(r"%[a-zA-Z_]+?(_[0-9]+)?(?![a-zA-Z_0-9])", "%…", reason)


def folded(texts: Counter[str] | Iterable[str]) -> tuple[str, ...]:
    """`model.layers.0.mlp`, `model.layers.1.mlp` → `model.layers.*.mlp × 2 (layers 0–1)`."""
    groups: dict[str, list[int | None]] = {}
    for text in Counter(texts).elements():
        layer = layer_of(text.split(":")[0])
        general = re.sub(rf"(\.|^){layer.index}(?=\.|:|,|$)", r"\1*", text, count=1) if layer else text
        groups.setdefault(general, []).append(layer.index if layer else None)
    found = []
    for text, layers in groups.items():
        numbers = sorted({index for index in layers if index is not None})
        if len(numbers) == 1:
            text = text.replace("*", str(numbers[0]), 1)
        times = f" × {len(layers)}" if len(layers) > 1 else ""
        found.append(f"{text}{times}" + (f" (layers {ranges(numbers)})" if len(numbers) > 1 else ""))
    return tuple(found)


def as_dict(diff: RunDiff) -> dict[str, Any]:
    return {
        "before": diff.before,
        "after": diff.after,
        "made_of": [asdict(detail) for detail in diff.made_of],
        "transforms": [asdict(transform) for transform in diff.transforms],
        "transform": diff.transform,
        "note": diff.note,
    }
