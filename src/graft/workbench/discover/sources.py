"""Where a graph to look at comes from: a model that is captured and transformed, or a folder of dumps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from graft.base.errors import DumpError, UsageError
from graft.base.files import Progress
from graft.passes.base import Context
from graft.passes.config import PipelineConfig, load_config
from graft.passes.dumps import MARKER
from graft.passes.pipeline import run_pipeline
from graft.passes.report import Report
from graft.workbench.discover.candidates import Discovery
from graft.workbench.discover.find import TOKENS, discover
from graft.workbench.discover.savings import Machine
from graft.workbench.discover.values import restore_values
from graft.workbench.model import captured
from graft.workbench.runs import open_run


def is_run(name: str) -> bool:
    """Whether a folder is meant as dumps. A folder that is neither dumps nor a model is an error."""
    path = Path(name)
    if not path.is_dir() or (path / "config.json").is_file():
        return False
    if not (path / MARKER).is_file():
        raise DumpError(
            f"{path} is neither a folder of dumps (graft dump MODEL -o DIR writes one) nor a model (no config.json)"
        )
    return True


def discover_model(
    name: str,
    config: PipelineConfig,
    dtype: str = "auto",
    *,
    tokens: Sequence[int] = TOKENS,
    machine: Machine | None = None,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
) -> Discovery:
    """Captures a model, transforms it as configured, and looks at what is left."""
    model, gm = captured(name, dtype, progress, trust_remote_code=trust_remote_code)
    run_pipeline(gm, config, Context(route="decoder", context_length=model.context), model=model.name)
    return discover(gm, model=model.name, config=config, tokens=tokens, machine=machine, progress=progress)


def discover_run(
    folder: str | Path,
    step: str = "",
    *,
    tokens: Sequence[int] = TOKENS,
    machine: Machine | None = None,
    progress: Progress | None = None,
) -> Discovery:
    """The last graph of a run, or the one after transform `step` (`captured`: the first)."""
    run = open_run(folder)
    chosen = run.steps[-1] if not step else run.steps[0] if step == "captured" else run.around(step)[1]
    gm = chosen.graph()
    restore_values(gm)
    name = f"{run.report.model or run.folder} after {chosen.transform}"
    config = config_of(run.report)
    return discover(gm, model=name, config=config, tokens=tokens, machine=machine, progress=progress)


def config_of(report: Report) -> PipelineConfig:
    """The defaults, with what was switched off in the run."""
    config = load_config()
    off = {name for name, record in report.transforms.items() if record.status == "disabled"}
    chosen = {n: replace(s, enabled=n in report.transforms and n not in off) for n, s in config.transforms.items()}
    return replace(config, transforms=chosen)


def read_tokens(text: str) -> tuple[int, ...]:
    """`1,512` → (1, 512)."""
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise UsageError(f"--tokens {text}: write one or more counts of tokens in a step, e.g. --tokens 1,512")
    return counts
