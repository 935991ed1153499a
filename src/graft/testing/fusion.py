"""Whether a transform fuses a small module, and whether it leaves another one alone.

trial = assert_fuses(Model(), (x,), "fuse_swiglu", count=1)     # every match is also checked numerically
assert_not_fuses(Other(), (x,), "fuse_swiglu", reason="second reader")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from graft.base.authors import told
from graft.base.errors import GraftError, TransformError, UnknownTransform
from graft.base.plugins import adopt
from graft.ir.io.text import graph_text, target_text
from graft.ir.nodes import calls
from graft.ir.trace import export_graph
from graft.passes.base import Context, Stage, TransformConfig
from graft.passes.config import PipelineConfig, Verify, load_config
from graft.passes.foreign import ForeignPass, name_of_pass, tried
from graft.passes.pipeline import run_pipeline
from graft.passes.registry import TransformRegistry, load_all
from graft.passes.report import Report, TransformRecord
from graft.testing.failure import failure, graph_lines, match_lines, miss_lines, times

Config = str | Path | Mapping[str, Any] | PipelineConfig | None
Tried = nn.Module | Callable[..., Any]


class AsModule(nn.Module):
    """A plain function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@dataclass(frozen=True)
class Trial:
    """One transform on one module: the graph before it as text, the graph after it, and what was recorded."""

    name: str
    transform: str
    before: str
    graph_module: GraphModule
    report: Report

    @property
    def record(self) -> TransformRecord:
        return self.report.transforms[self.transform]

    @property
    def after(self) -> str:
        return graph_text(self.graph_module.graph)

    @property
    def called(self) -> list[str]:
        """The ops that the graph calls now, in order: `graft.swiglu`, `aten.linear`."""
        return [target_text(node.target) for node in calls(self.graph_module.graph)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return self.graph_module(*args, **kwargs)


def as_module(module: Tried) -> nn.Module:
    return module if isinstance(module, nn.Module) else AsModule(module)


def name_of(module: Tried) -> str:
    return type(module).__name__ if isinstance(module, nn.Module) else getattr(module, "__name__", repr(module))


def settings_for(transform: str, alongside: Sequence[str], config: Config, verify: Verify) -> PipelineConfig:
    """The configuration with `transform` and `alongside` on and every other transform off."""
    load_all()
    for name in (transform, *alongside):
        if name not in TransformRegistry.names():
            raise UnknownTransform(
                name, TransformRegistry.names(), "a test (one that a build may lack: @pytest.mark.needs_transform)"
            )
        adopt(TransformRegistry.get(name).__module__)
    settings = config if isinstance(config, PipelineConfig) else load_config(config)
    if transform not in settings.transforms and issubclass(TransformRegistry.get(transform), ForeignPass):
        own = {transform: TransformConfig(Stage.FUSE)}
        settings = replace(settings, transforms={**settings.transforms, **own})
    unlisted = next((name for name in (transform, *alongside) if name not in settings.transforms), None)
    if unlisted is not None:
        raise UnknownTransform(
            unlisted,
            settings.transforms,
            "the configuration (a plugin lists it in the YAML beside it; or config=…, with its stage)",
        )
    on = {n: replace(s, enabled=n in (transform, *alongside)) for n, s in settings.transforms.items()}
    return replace(settings, transforms=on, verify=verify)


def try_transform(
    module: Tried,
    args: tuple[Any, ...],
    transform: str | Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    alongside: Sequence[str] = (),
    config: Config = None,
    dynamic_shapes: Any = None,
    verify: Verify = "matches",
    context: Context | None = None,
) -> Trial:
    """Captures `module` and runs one transform on it, with those named by `alongside`, in the pipeline's order.

    transform: its name, or any pass (passes/foreign.py): a function of a graph, a PatternMatcherPass…

    verify: "matches" also runs every match beside what it replaced; "structure" checks the graph alone.
    """
    with tried(transform) as name:
        settings = settings_for(name, alongside, config, verify)
        gm = export_graph(as_module(module), args, dict(kwargs or {}), dynamic_shapes)
        before = graph_text(gm.graph)
        report = run_pipeline(gm, settings, context)
    return Trial(name_of(module), name, before, gm, report)


def assert_fuses(
    module: Tried, args: tuple[Any, ...], transform: str | Any, *, count: int | None = None, **options: Any
) -> Trial:
    """The transform matches `count` times (at least once where that is left out), and every match is
    checked numerically.

    options: those of `try_transform`.
    """
    __tracebackhide__ = True
    expected = (
        f"{name_of_pass(transform)} matches {name_of(module)} {'at least once' if count is None else times(count)}"
    )
    try:
        trial = try_transform(module, args, transform, **options)
    except TransformError as error:
        raise failure(
            expected,
            "it failed, and the graph was put back",
            [why_of(error)],
            advice="correct the replacement or its check; the line above says which match, and how far it is off",
        ) from None
    found = len(trial.record.matches)
    if found == count or (count is None and found):
        return trial
    reason = [f"reason: {trial.record.reason}"] if trial.record.reason else []
    details = [*match_lines(trial.record), *miss_lines(trial.record.near_misses), *reason, *graph_lines(trial.before)]
    raise failure(
        expected,
        f"it matched {times(found)}",
        details,
        advice="compare the pattern with the graph above; the near miss names the node that differs",
    )


def why_of(error: TransformError) -> str:
    """What a transform raised: graft's own words, or the exception of its author's code with his file and line."""
    cause = error.__cause__ or error
    return str(cause) if isinstance(cause, GraftError) else f"{told(cause)}; try_transform(…) shows the traceback"


def assert_not_fuses(
    module: Tried, args: tuple[Any, ...], transform: str | Any, *, reason: str | None = None, **options: Any
) -> Trial:
    """The transform leaves the module alone: no match, a reason (with `reason` in it), the graph as it was."""
    __tracebackhide__ = True
    expected = f"{name_of_pass(transform)} leaves {name_of(module)} alone"
    try:
        trial = try_transform(module, args, transform, **options)
    except TransformError as error:
        raise failure(
            expected,
            "it matched, and what it made was refused",
            [why_of(error)],
            advice="refuse the site in the pattern's `check`, with the reason; do not leave it to verification",
        ) from None
    record = trial.record
    if record.matches:
        raise failure(
            expected,
            f"it matched {times(len(record.matches))}",
            [*match_lines(record), *graph_lines(trial.before)],
            advice="narrow the pattern, or refuse the site in its `check` with a reason",
        )
    told = [record.reason, *(miss.reason for miss in record.near_misses)]
    if reason is not None and not any(reason in text for text in told):
        raise failure(
            f"{expected}, and says why: {reason!r}",
            f"it gave another reason: {record.reason}",
            miss_lines(record.near_misses),
            advice="correct the expected reason, or let the pattern's `check` (or a refused Rewrite) give it",
        )
    others = any(r.matches for r in trial.report.transforms.values())
    if not others and trial.after != trial.before:
        raise failure(
            f"{expected}, and the graph stays as it was",
            "no match was recorded, and yet the graph changed",
            graph_lines(trial.after),
            advice="change the graph through Editor alone, with a match for each change",
        )
    return trial
