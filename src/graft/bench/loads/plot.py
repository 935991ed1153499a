"""Loads as a picture: tokens a second, latencies, where the time went, and how long steps took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graft.base.files import atomic_file, disk_errors
from graft.bench.loads.published import Published
from graft.bench.loads.throughput import LoadRow

WIDTH = 0.4  # of a bar, where two stand beside each other


def write_load_plot(
    setup: Mapping[str, Any], rows: Sequence[LoadRow], published: Published | None, path: Path
) -> None:
    """Four panels, a load beside the other. The file is whole or not there."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 8), layout="constrained")
    (rates, latencies), (phases, steps) = figure.subplots(2, 2)
    names = [f"{row.load.name}\n{row.load.requests}" for row in rows]
    at = range(len(rows))
    rates.bar([i - WIDTH / 2 for i in at], [row.output_tokens_per_s for row in rows], WIDTH, label="graft")
    if published is not None:
        theirs = [published.tokens_per_s.get(row.load.name, 0) for row in rows]
        rates.bar([i + WIDTH / 2 for i in at], theirs, WIDTH, label=published.source.partition(",")[0])
    rates.set_title("output tokens/s")
    for field, label in (("first_token", "TTFT"), ("between_tokens", "ITL")):
        for share, style in (("p50", "o"), ("p99", "^")):
            spreads = [getattr(row, field) for row in rows]
            values = [float("nan") if one is None else getattr(one, share) for one in spreads]
            latencies.plot(at, values, style, label=f"{label} {share}")
    latencies.set_yscale("log")
    latencies.set_title("ms until the first token, and between two")
    draw_phases(phases, rows)
    for axes in (rates, latencies, phases):
        axes.set_xticks(at, names)
    for row in rows:
        counts = [one.decode + one.prompts for one in row.step_times]
        steps.plot([one.up_to_ms for one in row.step_times], counts, marker="o", label=row.load.name)
    steps.set_xscale("log")
    steps.set_title("steps that took so many ms at most")
    for axes in (rates, latencies, phases, steps):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    weights = f", {setup['quantize']} weights" if setup["quantize"] else ""
    figure.suptitle(f"{setup['model']}, {setup['dtype']}{weights}, {setup['device_name']}, under load")
    with disk_errors(path), atomic_file(path) as partial:
        figure.savefig(partial)


def draw_phases(axes: Any, rows: Sequence[LoadRow]) -> None:
    """Shares on top of each other; the device's idle time as a mark."""
    below = [0.0] * len(rows)
    for name in rows[0].phase_percent:
        shares = [row.phase_percent[name] for row in rows]
        axes.bar(range(len(rows)), shares, 2 * WIDTH, bottom=below, label=name)
        below = [a + b for a, b in zip(below, shares, strict=True)]
    idle = [(i, row.idle_percent) for i, row in enumerate(rows) if row.idle_percent is not None]
    if idle:
        axes.plot([i for i, _ in idle], [share for _, share in idle], "k_", markersize=20, label="GPU idle")
    axes.set_title("percent of the time")
