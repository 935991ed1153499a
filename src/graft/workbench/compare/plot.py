"""The distances from float64 along the depth of a model, as a picture."""

from __future__ import annotations

from pathlib import Path

from graft.base.files import atomic_file, disk_errors
from graft.workbench.compare.compare import Boundary, Comparison


def plot_comparison(found: Comparison, rows: tuple[Boundary, ...], path: Path) -> None:
    """Two panels, prompt and decode steps, a line for each engine. The file is whole or not there."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, step in zip(panels, ("prompt", "decode"), strict=True):
        for who, field in (("graft", step), ("Hugging Face", f"hf_{step}")):
            points = [(at, getattr(one, field)) for at, one in enumerate(rows)]
            known = [(at, value) for at, value in points if value]
            axes.plot([at for at, _ in known], [value for _, value in known], marker=".", label=who)
        axes.set_yscale("log")
        axes.set_xlabel("module, from the first to the last")
        axes.set_title({"prompt": "prompt", "decode": "decode steps"}[step])
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("distance from float64, relative")
    panels[0].legend()
    figure.suptitle(f"{found.model}, {found.dtype}, {found.device}: {found.tokens} tokens")
    with disk_errors(path), atomic_file(path) as partial:
        figure.savefig(partial)
