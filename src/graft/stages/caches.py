"""Stage 7, caches: what was looked up, hit, missed or left out and why, and what is in the keys."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch._functorch.config
import torch._inductor.config

from graft.backends.inductor_caches import without_caches
from graft.stages.needs import missing, swapped
from graft.stages.story import CacheLookup, CacheStage, FreshProcess
from graft.stages.trace import TraceCollector, TraceRow

NEEDS = (
    "torch._inductor.codecache:FxGraphCache._get_tmp_dir",
    "torch._functorch._aot_autograd.autograd_cache:AOTAutogradCache._get_tmp_dir",
)
OUTCOMES = ("hit", "miss", "bypass")
KINDS = {
    f"{cache}_cache_{outcome}": (cache, outcome) for cache in ("fx_graph", "aotautograd") for outcome in OUTCOMES
}
MOST = 200  # characters of a component: a graph is thousands


@contextmanager
def own_caches(inside: Path | None = None) -> Iterator[Path]:
    """Within it, compiled graphs are looked for and kept in an empty folder (of `inside`), which is then gone.

    So every pass runs, keys are made, and the user's caches stay as they are. Compiled C++ and Triton code is found
    by its source as always: a new folder for that would build precompiled headers again, up to a minute.
    """
    if missing(NEEDS):  # the stage says so; all else can still be told
        with without_caches(), tempfile.TemporaryDirectory(prefix="graft-stages-", dir=inside) as folder:
            yield Path(folder)
        return
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
    from torch._inductor.codecache import FxGraphCache

    with tempfile.TemporaryDirectory(prefix="graft-stages-", dir=inside) as folder:
        home = Path(folder)
        with (
            swapped(FxGraphCache, "_get_tmp_dir", lambda _: lambda: str(home / "fxgraph")),
            swapped(AOTAutogradCache, "_get_tmp_dir", lambda _: lambda *_cls: str(home / "aotautograd")),
        ):
            yield home


def switched_off() -> str:
    """Why nothing would be looked up at all; empty where caches are on."""
    config: Any = torch._inductor.config
    if config.force_disable_caches:
        return "all caches are switched off (force_disable_caches)"
    off = [] if config.fx_graph_cache else ["fx_graph_cache"]
    off += [] if torch._functorch.config.enable_autograd_cache else ["enable_autograd_cache"]
    return f"switched off: {', '.join(off)}" if off else ""


def lookups(trace: TraceCollector) -> tuple[CacheLookup, ...]:
    return tuple(read_lookup(row) for row in trace.rows if row.kind in KINDS)


def read_lookup(row: TraceRow) -> CacheLookup:
    cache, outcome = KINDS[row.kind]
    told = row.json()
    data: dict[str, Any] = told if isinstance(told, dict) else {}
    components: dict[str, str] = {}
    for text in data.get("components") or ():
        found = re.match(r"\[(\w+)\] ([^:]+): (.*)", text, re.S)
        if found:
            components[found[2]] = f"{found[1][:12]} {' '.join(found[3].split())[:MOST]}"
    reason = data.get("cache_bypass_reason") or (data.get("cache_status_detailed", "") if outcome == "miss" else "")
    saved = float(data.get("time_saved_ns") or 0) / 1e6 or float(data.get("time_saved_ms") or 0)
    return CacheLookup(
        row.graph, cache, outcome, data.get("key") or "", " ".join(str(reason).split()), components, saved
    )


def cache_stage(
    trace: TraceCollector,
    again: TraceCollector | None,
    seconds: tuple[float, float],
    size: int,
    fresh: FreshProcess | None = None,
) -> CacheStage:
    return CacheStage(switched_off(), lookups(trace), lookups(again) if again else (), seconds, size, fresh)
