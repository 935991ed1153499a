"""An engine's logits over a prompt, decode steps and mixed batches, beside float64; and, in every dtype, the graph
after the transforms beside the captured one, with the transform and match to blame where they differ.

The engine runs as it is, with its backend and kernels, so its own dtype is judged by its logits: at most TIMES as far
from float64 as Hugging Face is. The graphs run node by node on the CPU (workbench/check).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graft.base.device_memory import free_memory, size_text
from graft.base.files import Progress
from graft.bench.quality import float64_twin, logits_error
from graft.capture.cache import captured_decoder
from graft.engine.llm import LLM
from graft.ir.edit import second_module
from graft.ir.nodes import calls
from graft.models.loaded import LoadedModel
from graft.ops.cases import tolerance
from graft.passes.base import Context
from graft.passes.config import PipelineConfig
from graft.passes.dumps import DumpWriter
from graft.passes.numeric.compare import CEILING, TIMES
from graft.passes.pipeline import order_transforms, run_pipeline
from graft.workbench.check.bisect import Bisection
from graft.workbench.check.end_to_end import agreement, end_to_end, own_limit
from graft.workbench.check.line import CheckLine
from graft.workbench.check.outputs import StepLogits, distance, limit
from graft.workbench.check.results import plain
from graft.workbench.check.scenario import Scenario, logits, scenario_of, slots_in
from graft.workbench.check.trial import CheckTrial, everywhere, try_loaded

COMPARED = 64  # tokens of a prompt that are compared
DTYPES = ("float32", "bfloat16", "float16")  # that a transform may meet
Load = Callable[[str], LoadedModel]  # the model in a dtype, on the CPU


@dataclass(frozen=True)
class StepError:
    """Distances from float64 of the logits that one kind of step gives, relative to their norm."""

    kind: str
    error: float
    hugging_face: float
    allowed: float

    @property
    def wrong(self) -> bool:
        return not self.error <= self.allowed


@dataclass(frozen=True)
class EngineComparison:
    """steps: none where float64 was not to be had, for the reason in `problem`. not_judged: why the distances of the
    steps say nothing about the transforms. graphs: a line for each dtype."""

    tokens: int
    backend: str
    steps: tuple[StepError, ...]
    graphs: tuple[CheckLine, ...]
    problem: str = ""
    not_judged: str = ""
    bisection: Bisection | None = None

    @property
    def failures(self) -> tuple[str, ...]:
        """What is wrong, in words: the transform and match to blame come first."""
        found = [f"{line.check}: {line.reason}" for line in self.graphs if line.verdict == "fail"]
        off = [step for step in self.steps if step.wrong and not self.not_judged]
        if off:
            kinds = ", ".join(f"{step.kind} {step.error:.1e} of {step.allowed:.1e} allowed" for step in off)
            blame = "" if found else f"; no transform is to blame, so the backend is: {self.backend}"
            found.append(f"the engine's logits are off float64: {kinds}{blame}")
        return tuple(found)

    def lines(self) -> list[str]:
        """What a person reads."""
        kinds = ", ".join(f"{s.kind} {s.error:.1e} (Hugging Face {s.hugging_face:.1e})" for s in self.steps)
        told = f"logits off float64, relative to their norm: {kinds}; a prompt of {self.tokens} tokens"
        told = f"logits: {self.problem}" if self.problem else told
        found = [f"{told}; {self.not_judged}" if self.not_judged else told]
        passed = [f"{line.check} {line.reason}" for line in self.graphs if line.verdict == "pass"]
        if passed:
            found.append(f"the graph before and after the transforms: {'; '.join(passed)}")
        skipped = [f"{line.check}: {line.reason}" for line in self.graphs if line.verdict == "skip"]
        return found + [f"the graph before and after the transforms, not compared: {text}" for text in skipped]

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self) | {"failures": list(self.failures), "ok": not self.failures}
        found["steps"] = [plain(asdict(step)) | {"wrong": step.wrong and not self.not_judged} for step in self.steps]
        return found | {"bisection": plain(asdict(self.bisection)) if self.bisection else None}


def compare_engine(
    llm: LLM, ids: Sequence[int], load: Load, settings: PipelineConfig, progress: Progress | None = None,
    dtypes: Sequence[str] = DTYPES,
) -> EngineComparison:  # fmt: skip
    """llm: with `keep_weights`. settings: of its pipeline, less what is for weights that stay in a file's blocks.
    dtypes: of graphs, beside the engine's own."""
    scenario = scenario_of(ids[:COMPARED])
    if progress:
        progress("comparing logits with float64", 0, 0)
    steps, problem = engine_steps_off(llm, scenario)
    lines, found = [], None
    own = str(llm.model.module.dtype).removeprefix("torch.")
    for dtype in (own, *(name for name in dtypes if name != own)):
        if progress:
            progress(f"comparing graphs in {dtype}", 0, 0)
        line, bisection = graphs_off(llm, dtype, own, load, settings, scenario)
        lines.append(replace(line, check=f"in {dtype}"))
        found = found or bisection
    tokens = min(len(ids), COMPARED)
    return EngineComparison(tokens, llm.backend, steps, tuple(lines), problem, coarser(llm), found)


def coarser(llm: LLM) -> str:
    """What of the engine is in a format that Hugging Face's module is not: its cost is no fault of a transform."""
    if llm.quantized:
        return f"not judged, since weights are in {llm.quantized.format}"
    caches = {tensor.dtype for tensor in llm.engine.tensors} - {llm.model.module.dtype}
    return f"not judged, since the cache is in {str(caches.pop()).removeprefix('torch.')}" if caches else ""


@torch.inference_mode()
def engine_steps_off(llm: LLM, scenario: Scenario) -> tuple[tuple[StepError, ...], str]:
    """By kind of step; or why float64 is not to be had."""
    module: Any = llm.model.module
    needed = sum(p.numel() * 8 for p in module.parameters())
    if (free := free_memory(llm.device)) < needed:
        return (), f"not compared with float64, which takes {size_text(needed)} of {size_text(free)} that are free"
    try:
        exact = module_rows(float64_twin(module), scenario)
    except (RuntimeError, NotImplementedError) as error:
        return (), f"not compared with float64, which the model does not run in: {str(error).splitlines()[0]}"
    ours, theirs = engine_rows(llm, scenario), module_rows(module, scenario)
    floor = tolerance(module.dtype, sum(1 for _ in calls(llm.graph_module.graph)))
    found = []
    for kind in dict.fromkeys(scenario.kinds):
        rows = [index for index, other in enumerate(scenario.kinds) if other == kind]
        error, own = (logits_error(values[rows], exact[rows]) for values in (ours, theirs))
        found.append(StepError(kind, error, own, max(TIMES * own, floor)))
    return tuple(found), ""


def engine_rows(llm: LLM, scenario: Scenario) -> Tensor:
    """[rows, vocabulary] of the engine's own graph, in caches of its own."""
    block = llm.engine.manager.block_size
    blocks = 1 + max(index for table in scenario.tables(block) for index in table)
    caches = [t.new_zeros((blocks, *t.shape[1:])) for t in llm.engine.tensors]
    states = [] if llm.engine.states is None else llm.engine.states.aside(blocks)[1:]
    made = []
    for batch in scenario.batches(block, llm.device):
        kept = (slots_in(batch), *states) if states else ()
        made.append(llm.engine.graph(*batch.inputs(), *caches, *kept)[0])
    return torch.cat([logits.reshape(-1, logits.shape[-1]).float() for logits in made])


def module_rows(module: Any, scenario: Scenario) -> Tensor:
    """[rows, vocabulary] of a Hugging Face module, which is given each sequence whole."""
    whole = [module(torch.tensor([ids], device=module.device)).logits[0] for ids in scenario.sequences]
    return torch.stack([whole[row.sequence][row.position] for row in scenario.rows])


def graphs_off(
    llm: LLM, dtype: str, own: str, load: Load, settings: PipelineConfig, scenario: Scenario
) -> tuple[CheckLine, Bisection | None]:
    """The graph after the transforms beside the captured one, and the transform and match to blame."""
    needed = sum(p.numel() for p in llm.model.module.parameters()) * 4 * 2  # the model, and its merged weights
    if (free := free_memory(torch.device("cpu"))) < needed:
        told = f"two copies take up to {size_text(needed)}, {size_text(free)} are free"
        return CheckLine("", "skip", told), None
    here = dtype == own and llm.device.type == "cpu"
    model = llm.model if here else load(dtype)
    elsewhere = llm.device.type != "cpu"
    quick = at_first_sight(model, settings, scenario, dtype, elsewhere)
    if quick is not None:
        return quick, None
    with tempfile.TemporaryDirectory() as scratch:
        trial = try_loaded(model, settings, Path(scratch) / "run", other_devices=elsewhere)
        line, found = held(trial, scenario, dtype)
        if found is not None:  # by then the time for trying every match up to there is well spent
            names = order_transforms(trial.config)
            names = names[: names.index(found.transform) + 1]
            trial = try_loaded(model, settings, Path(scratch) / "again", checked=names, other_devices=elsewhere)
            line, found = held(trial, scenario, dtype)
        return line, found


def at_first_sight(
    model: LoadedModel, settings: PipelineConfig, scenario: Scenario, dtype: str, elsewhere: bool
) -> CheckLine | None:
    """The line where the first and the last graph agree, as they nearly always do, or a transform failed; None where
    the graphs between them must be looked at, which takes a dump of each."""
    captured, _ = captured_decoder(model.module)
    chosen, _ = everywhere(settings, "cpu", elsewhere)
    gm, context = second_module(captured), Context(route="decoder", context_length=model.context)
    records = run_pipeline(gm, chosen, context, model=model.name, dump_dir=DumpWriter()).transforms.values()
    failed = [record for record in records if record.status == "rolled_back"]
    if failed:
        return CheckLine("", "fail", f"{failed[0].name} failed and was taken back: {failed[0].reason}")
    if any(match.numeric_check for record in records for match in record.matches):
        return None  # it changes numbers on purpose
    wanted = logits(captured, scenario)
    error = distance(logits(gm, scenario), wanted)
    allowed = tolerance(getattr(torch, dtype), sum(1 for _ in calls(captured.graph)))
    if allowed < error < CEILING:
        allowed = max(allowed, own_limit(captured, wanted, scenario))
    return CheckLine("", "pass", agreement(error, allowed)) if error <= allowed else None


def held(trial: CheckTrial, scenario: Scenario, dtype: str) -> tuple[CheckLine, Bisection | None]:
    outputs = StepLogits(trial.run, trial.state, fresh=True, scenario=scenario)
    return end_to_end(trial, outputs, limit(trial.run, getattr(torch, dtype)))
