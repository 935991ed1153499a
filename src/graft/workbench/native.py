"""The C++ of a model's step, without compiling it."""

from __future__ import annotations

from graft.backends.native.lower import source_of
from graft.backends.native.regions import split
from graft.base.errors import NothingNative
from graft.base.files import Progress
from graft.engine.setup.stages import filled, no_format_asked, settings_for
from graft.passes.base import Context
from graft.passes.config import PipelineConfig
from graft.passes.dumps import DumpWriter
from graft.passes.pipeline import run_pipeline
from graft.passes.report import Report
from graft.workbench.model import captured

NATIVE = "native.cpp"  # in a folder of dumps: the C++ of its last graph


def native_source(
    name: str,
    config: PipelineConfig,
    dtype: str = "auto",
    progress: Progress | None = None,
    *,
    trust_remote_code: bool = False,
) -> str:
    """What backend="native" would compile; the eager nodes and their reasons stand at its end, as comments."""
    return native_step(name, config, dtype, progress, trust_remote_code=trust_remote_code)[1]


def native_step(
    name: str,
    config: PipelineConfig,
    dtype: str = "auto",
    progress: Progress | None = None,
    dumps: DumpWriter | None = None,
    *,
    trust_remote_code: bool = False,
) -> tuple[Report, str]:
    """The pipeline as that backend runs it, with its graphs in `dumps`, and the C++ of the last of them.

    As for an engine, the weights of a GGUF file stay in its blocks where neither a dtype nor a format is asked for.
    """
    blocks = dtype == "auto" and no_format_asked(config)
    model, gm = captured(name, dtype, progress, weights=True, in_blocks=blocks, trust_remote_code=trust_remote_code)
    config = settings_for(model, config, None)
    context = Context(route="decoder", backend="native", context_length=model.context, lazy=model.lazy)
    if config.verify == "matches":
        filled(model.lazy, gm, "verify: matches computes with them")
    report = run_pipeline(gm, config, context, model=model.name, dump_dir=dumps, progress=progress)
    parts = split(gm, config.kernels)
    if not parts.regions:
        raise NothingNative(next(iter(parts.reasons.values()), "it has no ops"))
    left = [f"// eager: %{node.name}, {node.target}: {reason}\n" for node, reason in parts.reasons.items()]
    return report, source_of(parts).step + "".join(left)
