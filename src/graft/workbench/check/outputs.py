"""What a run's graphs compute: the logits after every transform, on the same seeded steps for all of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from graft.base.errors import DumpError
from graft.ops.cases import tolerance
from graft.passes.dumps import OUTPUTS
from graft.workbench.check.scenario import LENGTHS, SEED, STANDARD, STEPS, VOCABULARY, Scenario, logits
from graft.workbench.runs import StoredRun, StoredStep


@dataclass
class StepLogits:
    """The logits after each step of a run, computed when they are asked for; `runs` counts how often a graph ran.

    A step that changed nothing has those of the step before. stored: what was computed when the run was saved.
    fresh: the run is of this very check. scenario: the steps that the graphs run through.
    """

    run: StoredRun
    state: Mapping[str, torch.Tensor]
    stored: Mapping[str, torch.Tensor] = field(default_factory=dict)
    known: dict[int, torch.Tensor] = field(default_factory=dict)
    runs: int = 0
    fresh: bool = False
    scenario: Scenario = STANDARD

    @property
    def problem(self) -> str:
        """Why there are none, or ''."""
        if self.run.manifest.route != "decoder":
            return f"{self.run.folder} is no run of a decoder, so its inputs are not known"
        if self.stored or self.state:
            return ""
        if self.fresh:
            return "its weights would be random, so none were made; a checkpoint or a tiny model has them"
        if (self.run.folder / OUTPUTS).is_file():
            return f"the results in {self.run.folder} are of other inputs than these; save the baseline again"
        return (
            f"{self.run.folder} has neither weights nor results (graft dump --weights, graft check --save-baseline)"
        )

    def after(self, number: int) -> torch.Tensor:
        step = self.source(number)
        if step.number not in self.known:
            if step.transform in self.stored:
                self.known[step.number] = self.stored[step.transform]
            else:
                self.runs += 1
                self.known[step.number] = logits(step.graph(self.state), self.scenario)
        return self.known[step.number]

    def source(self, number: int) -> StoredStep:
        """The last step up to this one that changed the graph."""
        records = self.run.report.transforms
        steps = self.run.steps
        while number and not records[steps[number].transform].matches:
            number -= 1
        return steps[number]

    def save(self) -> None:
        """Beside the dumps, so that the run can be compared with where its kernels are other ones by then."""
        changed = {self.source(step.number).number for step in self.run.steps}
        tensors = {self.run.steps[number].transform: self.after(number).contiguous() for number in sorted(changed)}
        file = self.run.folder / OUTPUTS
        try:
            save_file(tensors, file, {"inputs": json.dumps(kind_of_inputs())})
        except (OSError, SafetensorError) as error:
            file.unlink(missing_ok=True)
            raise DumpError(f"cannot write {file}: {error}") from error


def kind_of_inputs() -> dict[str, Any]:
    """All that the inputs follow from, as JSON gives it back."""
    return json.loads(json.dumps({"lengths": LENGTHS, "steps": STEPS, "vocabulary": VOCABULARY, "seed": SEED}))


def stored_outputs(folder: Path) -> dict[str, torch.Tensor]:
    """What `save` wrote; nothing where there is none, or where it was of other inputs."""
    file = folder / OUTPUTS
    if not file.is_file():
        return {}
    try:
        with safe_open(file, "pt") as found:
            if json.loads(found.metadata()["inputs"]) != kind_of_inputs():
                return {}
            return {key: found.get_tensor(key) for key in found.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DumpError(f"{file} cannot be read ({error}); save the baseline again") from error


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, relative to the largest value; infinite where something is not a number, and for
    another shape or dtype: every graph gives the same rows."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return float("inf")
    left, right = got.double(), wanted.double()
    if torch.equal(left, right):
        return 0.0
    largest = right.abs().max().item()
    error = (left - right).abs().max().item()
    return error / largest if error == error and 0 < largest < float("inf") else float("inf")


def off_text(got: torch.Tensor, wanted: torch.Tensor) -> str:
    """`off by 1.2e-05 of the largest`, or what cannot be compared at all: `float32 [1, 8, 64] and not …`."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return f"{kind_text(got)} and not {kind_text(wanted)}"
    return f"off by {distance(got, wanted):.1e} of the largest"


def kind_text(results: torch.Tensor) -> str:
    return f"{str(results.dtype).removeprefix('torch.')} {list(results.shape)}"


def limit(run: StoredRun, dtype: torch.dtype) -> float:
    """How far results may be off: the dtype's tolerance for a chain as long as the graph has calls."""
    return tolerance(dtype, chain(run))


def chain(run: StoredRun) -> int:
    data: dict[str, Any] = json.loads(run.steps[0].stem.with_suffix(".json").read_text())
    return sum(node["op"] == "call_function" for node in data["nodes"])
