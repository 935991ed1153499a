"""A fusion candidate and all of them: what was found, what it would save, what is there already, what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch.fx import GraphModule

from graft.base.errors import PatternError, UnknownCandidate
from graft.ir.nodes import placeholders, tensor_val
from graft.ir.patterns.match import Finder
from graft.workbench.discover.lookup import Existing
from graft.workbench.discover.rating import NumericRisk
from graft.workbench.discover.regions import CandidateRegion, Kind
from graft.workbench.discover.savings import Estimate, Machine
from graft.workbench.discover.source import function_source, op_name
from graft.workbench.discover.subgraph import SIZED, extract

if TYPE_CHECKING:
    from graft.workbench.discover.measure import Measured

Recommendation = Literal["use_existing_kernel", "needs_triton_fallback", "defer"]


@dataclass(frozen=True)
class Candidate:
    """One structure that a graph repeats. `pieces` are its sites, the one with the most results first."""

    id: str
    kind: Kind
    title: str
    count: int
    sites: tuple[str, ...]
    nodes: tuple[str, ...]  # one instance as SSA text
    estimates: tuple[Estimate, ...]  # by count of tokens, in the order asked for
    lookup: Literal["found", "not_found"]
    existing: tuple[Existing, ...]
    recommendation: Recommendation
    reason: str
    complexity: int = 0  # rating.py
    numeric_risk: NumericRisk = "low"
    next_step: str = ""  # where it is not known what exists: the dump or the test that would tell
    strengths: tuple[str, ...] = ()
    weaknesses: tuple[str, ...] = ()
    risks: tuple[str, ...] = ()
    over: str = ""  # the candidate that it takes a GEMM with
    measured: tuple[Measured, ...] = ()  # by count of tokens, where a device was at hand
    pieces: tuple[CandidateRegion, ...] = field(default=(), repr=False)

    @property
    def saving_us(self) -> float:
        """At the first count of tokens."""
        return self.estimates[0].saving_us

    def subgraph(self) -> GraphModule:
        """One instance as a module of its own; its inputs carry their abstract values, weights are inputs too."""
        return extract(self.pieces[0])

    @property
    def function_name(self) -> str:
        return f"{self.kind}_{self.id}"

    def reference_source(self) -> str:
        """The instance as a plain PyTorch function, as text."""
        return function_source(self.subgraph(), self.function_name, f"{self.title}, found {self.count} times.")

    def function(self) -> Callable[..., Any]:
        """That source, loaded."""
        space: dict[str, Any] = {}
        exec(compile(self.reference_source(), f"<candidate {self.id}>", "exec"), space)
        return space[self.function_name]

    def pattern_problem(self) -> str:
        """'' where the source, taken as a pattern, matches its graph at every site; else why it does not."""
        if self.kind == "horizontal_gemm":
            return "it puts weights side by side, which is no pattern of calls; graft autofuse writes it"
        graph = self.pieces[0].nodes[0].graph
        number = next((n for n in placeholders(self.subgraph().graph) if tensor_val(n) is None), None)
        if number is not None:
            return f"it reads %{number.name}, a number known at run time only; a pattern takes tensors and constants"
        try:
            matches, misses = Finder(self.function(), self.pattern_shapes()).find(graph)
        except (PatternError, TypeError) as error:
            return str(error)
        if len(matches) >= self.count:
            return ""
        why = f": {max(misses, key=lambda miss: miss.matched).reason}" if misses else ""
        return f"as a pattern it fits at {len(matches)} of its {self.count} sites{why}"

    def pattern_shapes(self) -> dict[str, str]:
        """What a pattern of this source is traced with: `{"x": "b s d", "weight": "d"}`. Sizes that calls
        name are numbers; a tensor wider than the narrowest one names its dtype."""
        gm = self.subgraph()
        tensors = {node.name: value for node in placeholders(gm.graph) if (value := tensor_val(node)) is not None}
        floats = [t.dtype for t in tensors.values() if t.is_floating_point()]
        narrowest = min(floats, key=lambda dtype: dtype.itemsize, default=None)
        fixed = any(op_name(node) in SIZED for node in self.pieces[0].nodes)
        letters: dict[str, str] = {}
        shapes = {}
        for name, tensor in tensors.items():
            dims = [dim_text(size, letters, fixed) for size in tensor.shape]
            wide = f" : {str(tensor.dtype).removeprefix('torch.')}" if tensor.dtype is not narrowest else ""
            shapes[name] = f"{' '.join(dims)}{wide}"
        return shapes

    def to_dict(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in PLAIN}
        return plain | {
            "estimates": [vars(estimate) for estimate in self.estimates],
            "measured": [one.to_dict() for one in self.measured],
            "existing": [vars(found) for found in self.existing],
            "reference": self.reference_source(),
            "pattern": {"shapes": self.pattern_shapes(), "problem": self.pattern_problem()},
        }


PLAIN = (
    *("id", "kind", "title", "count", "sites", "nodes", "lookup", "recommendation"),
    *("reason", "complexity", "numeric_risk", "next_step", "strengths", "weaknesses", "risks"),
)


def dim_text(size: Any, letters: dict[str, str], fixed: bool) -> str:
    text = str(size)
    if text.isdigit() and (fixed or text == "1"):
        return text
    return letters.setdefault(text, "abcdefghijklmnopqrstuvwxyz"[len(letters) % 26])


@dataclass(frozen=True)
class Discovery:
    """Candidates by estimated saving; those that are not worth it now come last, each with its reason."""

    model: str
    candidates: tuple[Candidate, ...]
    tokens: tuple[int, ...]
    sizes: tuple[str, ...]  # what every symbolic size was taken for
    machine: Machine
    step_us: tuple[float, ...]  # the whole graph by the same model
    seconds: float = 0.0

    @property
    def worthwhile(self) -> tuple[Candidate, ...]:
        return tuple(c for c in self.candidates if c.recommendation != "defer")

    def find(self, name: str) -> Candidate:
        """By id, or a beginning of it that only one has."""
        found = [candidate for candidate in self.candidates if name and candidate.id.startswith(name)]
        if len(found) != 1:
            raise UnknownCandidate(name, [candidate.id for candidate in self.candidates])
        return found[0]

    def nothing_left(self) -> str:
        """The sentence for a graph that leaves nothing worthwhile, or ''."""
        if self.worthwhile:
            return ""
        if not self.candidates:
            return "nothing worthwhile is left: no two neighbouring calls could become one kernel"
        largest = max(self.candidates, key=lambda candidate: candidate.saving_us)
        return (
            f"nothing worthwhile is left: the largest that was considered is {largest.title} × {largest.count}"
            f" ({largest.saving_us:.1f} µs at {counted(self.tokens[0])}), and {largest.reason}"
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "tokens": self.tokens,
            "sizes": self.sizes,
            "machine": vars(self.machine),
            "step_us": self.step_us,
            "nothing_left": self.nothing_left(),
            "candidates": [candidate.to_dict() for candidate in self.candidates],
            "seconds": self.seconds,
        }


def counted(tokens: int) -> str:
    """`1 token`, `512 tokens`."""
    return f"{tokens} token{'' if tokens == 1 else 's'}"
