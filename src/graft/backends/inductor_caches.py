"""Inductor's caches: what a compilation looked up in them, and all of them with graft's own as one file.

torch.compiler.save_cache_artifacts gives what torch kept for this process (graphs, autotuning, profile-guided sizes);
here graft's captured graphs, checks and compiled C++ that the process used go with them, as a kind of torch's
artifacts of their own. Such a file is read by load_cache_artifacts here: torch alone does not know that kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager

from graft.base.cache_bundle import is_name
from graft.base.caches import CARRIED, USED
from graft.base.errors import UsageError
from graft.base.files import write_whole

MISS = "FXGraphCacheMiss"  # torch counts it as a miss, although it is raised as a bypass


def cache_hits() -> int:
    """How many graphs of this process came from Inductor's caches; a hit of the outer cache counts in both."""
    return max(counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"])


def cache_counts() -> dict[str, int]:
    """Hits, misses and bypasses of both caches so far; a hit of the outer cache counts in both."""
    pairs = {kind: (f"fxgraph_cache_{kind}", f"autograd_cache_{kind}") for kind in ("hit", "miss", "bypass")}
    return {k: max(counters["inductor"][a], counters["aot_autograd"][b]) for k, (a, b) in pairs.items()}


@contextmanager
def without_caches() -> Iterator[None]:
    """Within it, graphs are compiled and passes run; nothing comes from AOTAutograd's or Inductor's caches."""
    with ExitStack() as stack:
        stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        stack.enter_context(torch._inductor.config.patch(fx_graph_cache=False, fx_graph_remote_cache=False))
        yield


@dataclass
class Lookups:
    """Of one compilation. reasons: of bypasses, each once."""

    counts: dict[str, int] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)

    def note(self) -> str:
        """For the report; empty where nothing was looked up."""
        told = [f"{count} {word(kind, count)}" for kind, count in self.counts.items() if count]
        if not told:
            return ""
        why = f" ({'; '.join(self.reasons)})" if self.reasons else ""
        return f"Inductor's caches: {', '.join(told)}{why}"


def word(kind: str, count: int) -> str:
    return kind if count == 1 else f"{kind}{'s' if kind == 'hit' else 'es'}"


@contextmanager
def watched_lookups() -> Iterator[Lookups]:
    """Filled when the block ends. torch tells reasons to its log alone, so its exceptions are asked for them."""
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
    from torch._inductor.codecache import BypassFxGraphCache

    found, before = Lookups(), cache_counts()
    kinds = (BypassFxGraphCache, BypassAOTAutogradCache)

    def note(self: Exception, *args: object) -> None:
        Exception.__init__(self, *args)
        if type(self).__name__ != MISS and args and str(args[0]) not in found.reasons:
            found.reasons.append(str(args[0]))

    own = {kind: vars(kind).get("__init__") for kind in kinds}
    for kind in kinds:
        kind.__init__ = note  # type: ignore[method-assign]
    try:
        yield found
    finally:
        for kind, init in own.items():
            if init is None:
                del kind.__init__
            else:
                kind.__init__ = init  # type: ignore[method-assign]
        found.counts = {kind: count - before[kind] for kind, count in cache_counts().items()}


class WatchedCall:
    """A function that Inductor compiles when it is first called; what was looked up then."""

    def __init__(self, compiled: Callable[..., Any]) -> None:
        self.compiled = compiled
        self.lookups: Lookups | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.lookups is not None:
            return self.compiled(*args, **kwargs)
        with watched_lookups() as found:
            result = self.compiled(*args, **kwargs)
        self.lookups = found
        return result

    def notes(self) -> tuple[str, ...]:
        note = self.lookups.note() if self.lookups else ""
        return (note,) if note else ()


class GraftArtifact(CacheArtifact):
    """A file of graft's caches: `kind/file`."""

    @staticmethod
    def type() -> str:
        return "graft"

    def populate_cache(self) -> None:
        folder, _, name = self.key.partition("/")
        kind = next((kind for kind in CARRIED if kind.name == folder), None)
        if kind is None or not is_name(name):
            raise UsageError(f"the artifacts hold {self.key!r}, which is no file of graft's caches; save them again")
        if not (kind.folder() / name).exists():
            write_whole(kind.folder() / name, self.content)


def register() -> None:
    if GraftArtifact.type() not in CacheArtifactFactory._artifact_types:
        CacheArtifactFactory.register(GraftArtifact)


def save_cache_artifacts() -> bytes | None:
    """What torch and graft kept on disk for this process, for another one; None where there is nothing."""
    register()
    for path in USED:
        kind = next((kind for kind in CARRIED if kind.folder() == path.parent), None)
        for file in sorted(path.parent.glob(f"{path.stem}.*")) if kind is not None else ():
            if file.suffix != ".lock" and kind is not None:
                CacheArtifactManager.record_artifact("graft", f"{kind.name}/{file.name}", file.read_bytes())
    found = torch.compiler.save_cache_artifacts()
    return None if found is None else found[0]


def load_cache_artifacts(content: bytes) -> dict[str, list[str]]:
    """Fills the caches; what came, by kind. It may hold code: load what you or people you trust have saved."""
    register()
    found = torch.compiler.load_cache_artifacts(content)
    if found is None:
        raise UsageError("these are no cache artifacts of this torch, or they are damaged; save them again")
    return {kind: list(keys) for kind, keys in found.artifacts.items()}


@contextmanager
def only_new_artifacts() -> Iterator[None]:
    """Within it, artifacts are those of what is compiled there."""
    with CacheArtifactManager.with_fresh_cache():
        yield
