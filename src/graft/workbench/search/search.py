"""From a pattern to everything that has it: graphs of models, dumps, kernels."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graft.base.errors import GraftError, UnknownModel
from graft.base.files import Progress
from graft.workbench.discover.lookup import Existing
from graft.workbench.discover.sources import is_run
from graft.workbench.discover.values import restore_values
from graft.workbench.model import captured
from graft.workbench.runs import open_run
from graft.workbench.search.kernels import kernels_for
from graft.workbench.search.occurrences import GraphHits, search_graph
from graft.workbench.search.pattern import SearchPattern


@dataclass(frozen=True)
class Found:
    """unseen: why some kernels could not be compared by value."""

    pattern: str
    graphs: tuple[GraphHits, ...]
    kernels: tuple[Existing, ...]
    unseen: str
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "pattern": self.pattern,
            "exact": sum(one.exact for one in self.graphs),
            "near": sum(one.near for one in self.graphs),
            "graphs": [one.to_dict() for one in self.graphs],
            "kernels": [vars(kernel) for kernel in self.kernels],
            "not_compared": self.unseen,
            "seconds": round(self.seconds, 3),
        }


def search(
    pattern: SearchPattern,
    places: Sequence[str] = (),
    dtype: str = "auto",
    step: str = "",
    progress: Progress | None = None,
    *,
    trust_remote_code: bool = False,
) -> Found:
    """places: models, whose captured graphs are searched, and folders of dumps, of which the first graph is, or the
    one after transform `step`."""
    started = time.perf_counter()
    kernels, unseen = kernels_for(pattern) if pattern.function is not None else ((), "")
    hits = []
    for index, name in enumerate(places):
        if progress:
            progress(name, index, len(places))
        hits.append(search_place(pattern, name, dtype, step, several=len(places) > 1, trust=trust_remote_code))
    return Found(pattern.text, tuple(hits), tuple(kernels), unseen, time.perf_counter() - started)


def search_place(
    pattern: SearchPattern, name: str, dtype: str, step: str, *, several: bool, trust: bool
) -> GraphHits:
    """Of several places, one that cannot be read is told beside the others."""
    try:
        if is_run(name):
            run = open_run(name)
            chosen = run.steps[0] if step in ("", "captured") else run.around(step)[1]
            gm = chosen.graph()
            restore_values(gm)
            return search_graph(pattern, gm.graph, f"{name} after {chosen.transform}")
        return search_graph(pattern, captured(name, dtype, trust_remote_code=trust)[1].graph, name)
    except UnknownModel:
        raise
    except GraftError as error:
        if not several:
            raise
        return GraphHits(name, 0, (), 0, (), str(error))
