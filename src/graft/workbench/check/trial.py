"""The run that is checked: a model that goes through the pipeline now, or one that did and was dumped."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from graft.base.errors import NumericCheckError
from graft.base.files import Progress
from graft.capture.cache import captured_decoder
from graft.ir.edit import second_module
from graft.ir.verify import GraphSnapshot
from graft.models.load import load_model
from graft.models.loaded import LoadedModel
from graft.models.registry import Family, entries
from graft.passes.base import BaseTransform, Context
from graft.passes.config import PipelineConfig
from graft.passes.dumps import WEIGHTS, DumpWriter
from graft.passes.numeric.sides import Sides
from graft.passes.numeric_check import MatchTrials
from graft.passes.pipeline import run_pipeline
from graft.passes.report import MatchRecord, TransformRecord
from graft.workbench.check.op_safety import brought_ops, op_problems
from graft.workbench.check.steps import StepGraphs
from graft.workbench.discover.sources import config_of
from graft.workbench.runs import StoredRun, open_run


@dataclass(frozen=True)
class WrongMatch:
    """A match whose replacement computes something else; `match` is '' where the whole transform is meant."""

    match: str
    reason: str


@dataclass(frozen=True)
class CheckTrial:
    """state: the weights, empty where there are none. captured: the graph as it was before, where it is at hand."""

    graphs: StepGraphs
    config: PipelineConfig
    family: Family | None
    layers: int | None
    state: Mapping[str, torch.Tensor]
    on_gpu: bool  # whether the transforms that are for a GPU ran
    wrong_matches: Mapping[str, tuple[WrongMatch, ...]] = field(default_factory=dict)
    on_purpose: frozenset[str] = frozenset()  # transforms that change numbers, and bring their own check
    ops: Mapping[str, Mapping[str, list[str]]] = field(default_factory=dict)  # of each transform: what is wrong
    captured: GraphModule | None = None
    context_length: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def run(self) -> StoredRun:
        return self.graphs.run

    def fresh_context(self) -> Context:
        return Context(route="decoder", context_length=self.context_length)


def try_model(
    name: str,
    config: PipelineConfig,
    folder: Path,
    *,
    dtype: str = "auto",
    checked: Collection[str] = (),
    progress: Progress | None = None,
    trust_remote_code: bool = False,
    other_devices: bool = True,
) -> CheckTrial:
    """Runs the pipeline as configured, dumping every step to `folder`; the matches of `checked` are run one by one.

    A match that is wrong stays, so that what it does to the results can be seen. Models with random weights and a
    real model's size go without weights: their matches are checked on made-up ones, their results are not computed.
    """
    entry = entries().get(name)
    bare = entry is not None and entry.kind == "random" and not name.startswith("tiny-")
    site = "meta" if bare else "cpu"
    model = load_model(name, dtype=dtype, device=site, progress=progress, trust_remote_code=trust_remote_code)
    return try_loaded(model, config, folder, checked=checked, other_devices=other_devices, progress=progress)


def try_loaded(
    model: LoadedModel,
    config: PipelineConfig,
    folder: Path,
    *,
    checked: Collection[str] = (),
    other_devices: bool = True,
    progress: Progress | None = None,
) -> CheckTrial:
    """The same of a model on the CPU, or without weights. other_devices: transforms that are for them run, too."""
    device = model.module.device.type
    captured, _ = captured_decoder(model.module, progress)
    chosen, forced = everywhere(config, device, other_devices)
    dumps = DumpWriter.open(folder)
    dumps.state = None if device == "meta" else {}
    checker = MatchChecker(frozenset(checked), model.context)
    context = Context(route="decoder", context_length=model.context)
    run_pipeline(
        second_module(captured), chosen, context, model=model.name, dump_dir=dumps, progress=progress,
        observe=checker,
    )  # fmt: skip
    said = (forced_note(forced, device),) if forced else ()
    return CheckTrial(
        StepGraphs(open_run(folder)), chosen, model.family, model.layers, dumps.state or {}, bool(forced),
        checker.wrong_matches, frozenset(checker.on_purpose), checker.ops, captured, model.context, said,
    )  # fmt: skip


def read_run(folder: str | Path) -> CheckTrial:
    """A folder of dumps as it is: nothing is captured or transformed anew."""
    run = open_run(folder)
    entry = entries().get(run.manifest.model)
    family = entry.family if entry else None
    layers = None if entry is None else entry.settings.get("num_hidden_layers", entry.settings.get("n_layer"))
    state = run.state() if (run.folder / WEIGHTS).is_file() else {}
    for_gpu = family.expect_gpu if family else {}
    records = run.report.transforms
    on_gpu = any(name in records and records[name].status == "applied" for name in for_gpu)
    note = "read from dumps: nothing was captured or transformed anew"
    return CheckTrial(StepGraphs(run), config_of(run.report), family, layers, state, on_gpu, notes=(note,))


def everywhere(config: PipelineConfig, device: str, force: bool = True) -> tuple[PipelineConfig, list[str]]:
    """Transforms for other devices run on this one too, and every error is recorded; which ones were forced.

    Where a user said which devices, that holds.
    """
    chosen, forced = {}, []
    for name, settings in config.transforms.items():
        chosen[name] = replace(settings, on_error="skip")
        options: Any = settings
        said = config.origins.get(f"transforms.{name}.devices", "default.yaml") != "default.yaml"
        if force and settings.enabled and device not in getattr(options, "devices", (device,)) and not said:
            chosen[name] = replace(options, on_error="skip", devices=(*options.devices, device))
            forced.append(name)
    return replace(config, transforms=chosen, verify="structure"), forced


def forced_note(names: Sequence[str], device: str) -> str:
    """What was done about transforms that this device would not run, and how to have it otherwise."""
    return (
        f"for another device, tried on the {device} all the same, with the references of their ops and not their"
        f" kernels: {', '.join(names)}; --set transforms.{names[0]}.devices=[cuda] leaves one out"
    )


class MatchChecker:
    """Runs the matches of the named transforms beside what they replaced, each by itself, and takes nothing back."""

    def __init__(self, names: Collection[str], most: int | None) -> None:
        self.names, self.most = names, most
        self.wrong_matches: dict[str, tuple[WrongMatch, ...]] = {}
        self.on_purpose: set[str] = set()
        self.ops: dict[str, dict[str, list[str]]] = {}

    def __call__(
        self, gm: GraphModule, before: GraphSnapshot, transform: BaseTransform, record: TransformRecord
    ) -> TransformRecord:
        if any(match.numeric_check for match in record.matches):
            self.on_purpose.add(record.name)
        if record.name not in self.names:
            return record
        self.ops[record.name] = {str(op): op_problems(gm, node) for op, node in brought_ops(gm, record).items()}
        if transform.uncheckable:
            return replace(record, unchecked=transform.uncheckable)
        found: list[WrongMatch] = []
        try:
            sides = Sides.of(gm, before, record.matches)
            sides.check_rewiring()
            trials = MatchTrials(sides, self.most, transform.not_kept)
            matches = tuple(checked_match(trials, match, found) for match in record.matches)
        except NumericCheckError as error:
            found, matches = [WrongMatch("", str(error))], record.matches
        if found:
            self.wrong_matches[record.name] = tuple(found)
        return replace(record, matches=matches, unchecked=found[0].reason if found else "")


def checked_match(trials: MatchTrials, match: MatchRecord, failed: list[WrongMatch]) -> MatchRecord:
    if match.numeric_check:
        return match
    try:
        return trials.checked(match)
    except NumericCheckError as error:
        failed.append(WrongMatch(match.anchor, str(error)))
        return match
