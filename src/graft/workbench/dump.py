"""Dumps of a run: the graph after every transform, as text and as JSON that loads back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from graft.base.files import Progress, write_whole
from graft.passes.base import Context
from graft.passes.config import PipelineConfig
from graft.passes.dumps import DumpWriter
from graft.passes.pipeline import run_pipeline
from graft.passes.report import Report
from graft.workbench.model import captured
from graft.workbench.native import NATIVE, native_step
from graft.workbench.stored import save_state


def dump_model(
    name: str,
    folder: Path,
    config: PipelineConfig,
    dtype: str = "auto",
    progress: Progress | None = None,
    *,
    weights: bool = False,
    fold: bool = False,
    native: bool = False,
    inductor: bool = False,
    trust_remote_code: bool = False,
) -> Report:
    """Captures and transforms a model, writing every step to `folder`.

    weights: also all tensors that any step reads, so that the graphs can be run. Without it random-weight models stay
    without weights. fold: equal layers stand once in the text; the JSON has them all.
    native: the graphs of that backend, and its C++ of the last one.
    inductor: also, in `inductor/graph_0`, Inductor's graph before and after fix_functionalization.
    """
    dumps = DumpWriter.open(folder)
    dumps.state, dumps.fold = ({} if weights else None), fold
    (folder / NATIVE).unlink(missing_ok=True)  # of another run
    if native:
        report, source = native_step(name, config, dtype, progress, dumps, trust_remote_code=trust_remote_code)
        write_whole(folder / NATIVE, source)
    else:
        model, gm = captured(name, dtype, progress, weights=weights, trust_remote_code=trust_remote_code)
        context = Context(route="decoder", context_length=model.context)
        report = run_pipeline(gm, config, context, model=model.name, dump_dir=dumps, progress=progress)
        if inductor:
            from graft.workbench.post_grad import fix_on_post_grad  # Inductor, where it is used

            record = fix_on_post_grad(gm, config, folder / "inductor").record
            report = replace(report, transforms={**report.transforms, record.name: record})
    if dumps.state is not None:
        save_state(dumps.state, folder)
    return report
