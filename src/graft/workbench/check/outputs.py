"""What a run's graphs compute: the logits after every step, on the same seeded tokens for all of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.fx import GraphModule, Interpreter, Node

from graft.base.errors import DumpError
from graft.ir.nodes import placeholders
from graft.ops.cases import tolerance
from graft.ops.layout import HostBatch, pack
from graft.passes.dumps import OUTPUTS
from graft.workbench.discover.values import DTYPES, TENSOR, split
from graft.workbench.runs import StoredRun, StoredStep

TOKENS = 8  # of one sequence: less than a block of the cache
SEED, VOCABULARY = 0, 100  # no model has fewer tokens


def seeded_tokens() -> torch.Tensor:
    """[1, TOKENS], the same in every run and for every model."""
    return torch.randint(0, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(SEED))


def inputs_of(gm: GraphModule) -> list[torch.Tensor]:
    """One sequence of TOKENS tokens for a decoder's graph of any stage: with a cache (empty) or without one."""
    host = HostBatch()
    host.add(seeded_tokens()[0].tolist(), 0, [0], TOKENS)
    known = vars(pack(host, torch.device("cpu")))
    return [known[n.name] if n.name in known else empty_cache(n) for n in placeholders(gm.graph)]


def empty_cache(node: Node) -> torch.Tensor:
    """Zeros in the shape that is recorded; a size that is open (how many blocks there are) is 2."""
    recorded = node.meta.get("val")
    text = str(node.meta.get("value_text"))
    if isinstance(recorded, torch.Tensor):
        return torch.zeros([s if isinstance(s, int) else 2 for s in recorded.shape], dtype=recorded.dtype)
    found = TENSOR.fullmatch(text)
    if found is None or not DTYPES[found[1]].is_floating_point:
        raise DumpError(
            f"the graph has the input {node.name} ({text}), which no decoder of graft has; it was not run"
        )
    return torch.zeros([int(size) if size.isdigit() else 2 for size in split(found[2])], dtype=DTYPES[found[1]])


def logits(gm: GraphModule) -> torch.Tensor:
    """[1, TOKENS, vocabulary], or [1, 1, vocabulary] where the graph gives the last token's alone."""
    with torch.no_grad():
        return Interpreter(gm).run(*inputs_of(gm))[0].detach()


@dataclass
class StepLogits:
    """The logits after each step of a run, computed when they are asked for; `runs` counts how often a graph ran.

    A step that changed nothing has those of the step before. stored: what was computed when the run was saved.
    fresh: the run is of this very check.
    """

    run: StoredRun
    state: Mapping[str, torch.Tensor]
    stored: Mapping[str, torch.Tensor] = field(default_factory=dict)
    known: dict[int, torch.Tensor] = field(default_factory=dict)
    runs: int = 0
    fresh: bool = False

    @property
    def problem(self) -> str:
        """Why there are none, or ''."""
        if self.run.manifest.route != "decoder":
            return f"{self.run.folder} is no run of a decoder, so its inputs are not known"
        if self.stored or self.state:
            return ""
        if self.fresh:
            return "its weights would be random, so none were made; a checkpoint or a tiny model has them"
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
                self.known[step.number] = logits(step.graph(self.state))
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


def kind_of_inputs() -> dict[str, int]:
    return {"tokens": TOKENS, "seed": SEED}


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
    """The largest difference, relative to the largest value; infinite where something is not a number.

    Where one of them has the last token's logits alone, that token is compared.
    """
    if got.shape[1] != wanted.shape[1]:
        got, wanted = got[:, -1:], wanted[:, -1:]
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return float("inf")
    left, right = got.double(), wanted.double()
    if torch.equal(left, right):
        return 0.0
    largest = right.abs().max().item()
    error = (left - right).abs().max().item()
    return error / largest if error == error and 0 < largest < float("inf") else float("inf")


def limit(run: StoredRun, dtype: torch.dtype) -> float:
    """How far results may be off: the dtype's tolerance for a chain as long as the graph has calls."""
    return tolerance(dtype, chain(run))


def chain(run: StoredRun) -> int:
    data: dict[str, Any] = json.loads(run.steps[0].stem.with_suffix(".json").read_text())
    return sum(node["op"] == "call_function" for node in data["nodes"])
