"""A table over families: how near each comes to its bandwidth bound, and how long it took to build.

Every model is built and measured in a process of its own with empty caches, so that one that fails, hangs or takes
all memory is a row, and so that no family finds kernels that another one left behind. Several may be built side by
side; then each waits for its turn, and is measured while the others do nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from graft.base.errors import UsageError, near
from graft.base.files import Progress
from graft.bench.family_turns import Building, finish, start, wait_until_built
from graft.bench.plan import BenchPlan
from graft.models.registry import RegistryEntry, entries, families

CPU_WEIGHTS = 1 << 30  # bytes of a model on a CPU: more than any cache, and read in less than 0.1 s
LONGEST = 900.0  # seconds to build a family, and to measure it; the slowest took 77 to build by itself on a GPU


@dataclass(frozen=True)
class FamilyPlan:
    """weights: bytes that a model may have; a larger one is cut to fewer layers. None: all as they are.

    time_limit: seconds after which no family is begun, and the one that runs is ended. side_by_side: built at once.
    """

    models: tuple[str, ...]
    bench: BenchPlan
    dtype: str = "auto"
    device: str = "auto"
    backend: str = "auto"
    quantize: str | None = None
    weights: int | None = None
    time_limit: float | None = None
    side_by_side: int = 1
    sets: tuple[str, ...] = ()  # changes of the configuration, as --set has them


@dataclass(frozen=True)
class FamilyRow:
    """One model at one batch size. share: of the bandwidth bound, 1 at the bound. A failure says why."""

    family: str
    model: str
    batch: int
    layers: int | None = None
    layers_of: int | None = None
    weight_bytes: int | None = None
    token_ms: float | None = None
    tokens_per_s: float | None = None
    share: float | None = None
    built_s: float | None = None
    backend: str = ""
    failed: str = ""
    begun: bool = True


@dataclass(frozen=True)
class FamilyTable:
    setup: Mapping[str, Any] = field(default_factory=dict)  # of the first family that said it
    rows: tuple[FamilyRow, ...] = ()
    interrupted: bool = False

    def to_data(self) -> dict[str, Any]:
        return asdict(self)


def models_of(names: Sequence[str], *, all_sizes: bool) -> tuple[str, ...]:
    """Registry models of families, or models themselves; none given: of every family. all_sizes: not the first of
    each family alone."""
    known, models = families(), entries()
    found: list[str] = []
    for name in names or known:
        if name in known:
            family = known[name]
            sizes = [*family.models, *family.embedded]
            found += sizes if all_sizes else sizes[:1]
        elif name in models:
            found.append(name)
        else:
            raise UsageError(f"--families: {name!r} is no family and no model{near(name, [*known, *models])}")
    return tuple(dict.fromkeys(found))


def measure_families(plan: FamilyPlan, progress: Progress | None = None) -> FamilyTable:
    """Row by row. Ctrl-C ends it with what is there."""
    tell, began, table, done = progress or (lambda *_: None), time.monotonic(), FamilyTable(), 0
    known, end = entries(), math.inf if plan.time_limit is None else began + plan.time_limit
    for wave in waves(plan):
        if time.monotonic() >= end:
            for model in wave:
                rows = failed_rows(plan, known[model], "not begun: raise --time-limit", begun=False)
                table = with_rows(table, rows)
            continue
        tell(f"{', '.join(wave)}: building and measuring", done, len(plan.models))
        try:
            for model, said, why in in_processes(plan, wave, LONGEST, end):
                rows = failed_rows(plan, known[model], why) if said is None else rows_of(plan, known[model], said)
                setup = table.setup or ({} if said is None else said["bench"]["setup"])
                table, done = with_rows(replace(table, setup=setup), rows), done + 1
                tell(f"{model}: measured", done, len(plan.models))
        except KeyboardInterrupt:
            return replace(table, interrupted=True)
    return table


def waves(plan: FamilyPlan) -> Iterator[tuple[str, ...]]:
    """The models in their order, as many together as are built side by side."""
    for first in range(0, len(plan.models), plan.side_by_side):
        yield plan.models[first : first + plan.side_by_side]


def in_processes(
    plan: FamilyPlan, models: Sequence[str], seconds: float, end: float = math.inf
) -> Iterator[tuple[str, dict[str, Any] | None, str]]:
    """Each model with what its process says, or None and why there is nothing. seconds: to build, and to measure.
    end: of the clock, when whatever runs is ended."""
    building: list[Building] = []
    try:
        for model in models:
            building.append(start({**asdict(plan), "model": model}))
        wait_until_built(building, left(seconds, end))
        for model, one in zip(models, building, strict=True):
            yield model, *finish(one, left(seconds, end))
    finally:
        for one in building:
            one.close()


def left(seconds: float, end: float) -> float:
    """Of so many seconds, those before `end`."""
    return max(min(seconds, end - time.monotonic()), 0.0)


def with_rows(table: FamilyTable, rows: Sequence[FamilyRow]) -> FamilyTable:
    return replace(table, rows=(*table.rows, *rows))


def rows_of(plan: FamilyPlan, entry: RegistryEntry, said: Mapping[str, Any]) -> list[FamilyRow]:
    found = [row for row in said["bench"]["rows"] if row["engine"] == "graft"]
    about = {key: said[key] for key in ("layers", "layers_of", "weight_bytes")}
    rows = []
    for row in found:
        share = row["roofline_percent"]
        rows.append(
            FamilyRow(
                entry.family.name, entry.name, row["batch"], **about, token_ms=row["token_ms"],
                tokens_per_s=row["decode_tokens_per_s"], share=None if share is None else share / 100,
                built_s=row["build_seconds"], backend=said["bench"]["setup"]["backend"], failed=row["failed"],
            )
        )  # fmt: skip
    missing = set(plan.bench.batches) - {row.batch for row in rows}
    return rows + [row for row in failed_rows(plan, entry, "its process was interrupted") if row.batch in missing]


def failed_rows(plan: FamilyPlan, entry: RegistryEntry, why: str, *, begun: bool = True) -> list[FamilyRow]:
    return [FamilyRow(entry.family.name, entry.name, batch, failed=why, begun=begun) for batch in plan.bench.batches]
