"""A server's throughput and latencies over its load, as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graft.base.files import atomic_file, disk_errors
from graft.bench.server.load import ServerRow

LATENCIES = {"TTFT": "first_token", "ITL": "between_tokens"}


def write_server_plot(setup: Mapping[str, Any], rows: Sequence[ServerRow], path: Path) -> None:
    """Three panels, one line a prompt length. The file is whole or not there."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    panels = figure.subplots(1, 3)
    for load in dict.fromkeys(row.load.name for row in rows):
        some = [row for row in rows if row.load.name == load]
        where = [row.clients or row.load.rate for row in some]
        panels[0].plot(where, [row.output_tokens_per_s for row in some], marker="o", label=load)
        for panel, (name, field) in zip(panels[1:], LATENCIES.items(), strict=True):
            for share, style in (("p50", "-"), ("p99", "--")):
                found = [(at, getattr(row, field)) for at, row in zip(where, some, strict=True)]
                known = [(at, getattr(spread, share)) for at, spread in found if spread is not None]
                panel.plot(
                    *([at for at, _ in known], [ms for _, ms in known]), style, marker="o", label=f"{load} {share}"
                )
            panel.set_title(f"{name}, ms")
    panels[0].set_title("output tokens/s")
    for panel in panels:
        panel.set_xlabel("clients" if rows[0].clients else "requests/s")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.legend()
    figure.suptitle(f"{setup['model']} at {setup['url']}, {setup['endpoint']}")
    with disk_errors(path), atomic_file(path) as partial:
        figure.savefig(partial)
