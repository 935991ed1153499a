"""Throughput and latency over batch sizes as a picture."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from graft.base.errors import UsageError
from graft.base.files import atomic_file, disk_errors
from graft.bench.rows import Bench

SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """What would keep the picture from being written, told before anything is measured."""
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--plot {path}: the name must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: the folder {path.parent} does not exist")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed: pip install 'graft[bench]'")


def write_plot(bench: Bench, path: Path) -> None:
    """Two panels, one line an engine and prompt. The file is whole or not there."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for engine, prompt in dict.fromkeys((row.engine, row.prompt) for row in bench.rows):
        rows = [row for row in bench.rows if (row.engine, row.prompt) == (engine, prompt) and row.token_ms]
        name = engine if len(bench.setup["prompts"]) == 1 else f"{engine}, prompt {prompt}"
        label = name if rows else f"{name} (failed)"  # in the legend all the same
        left.plot([r.batch for r in rows], [r.decode_tokens_per_s for r in rows], marker="o", label=label)
        right.plot([r.batch for r in rows], [r.token_ms for r in rows], marker="o", label=label)
    for axes, title in ((left, "decode, tokens/s"), (right, "time per output token, ms")):
        axes.set_xscale("log", base=2)
        ticks = sorted({row.batch for row in bench.rows})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("batch")
        axes.set_title(title)
        axes.grid(alpha=0.3)
    left.legend()
    figure.suptitle(headline(bench))
    with disk_errors(path), atomic_file(path) as partial:
        figure.savefig(partial)


def headline(bench: Bench) -> str:
    s = bench.setup
    cut = ", interrupted" if bench.interrupted else ""
    prompts = ", ".join(map(str, s["prompts"]))
    return f"{s['model']}, {s['dtype']}, {s['device_name']}: prompt {prompts}, new {s['new']}{cut}"
