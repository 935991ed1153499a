"""Candidates timed on a device: one site as it is now, by the kernel that exists, and a copy of what must be moved.

The copy reads and writes as many bytes as one kernel for the site would: no kernel for it is much faster. On a GPU
calls are replayed as one CUDA graph, several in a row, so that launches cost what they cost in a decode step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter

from graft.base.errors import GraftError, NoGpu, UsageError
from graft.base.files import Progress
from graft.base.timers import call_seconds
from graft.ir.evaluate import fill
from graft.ir.nodes import placeholders, val
from graft.ops.launch import launch_failures
from graft.workbench.discover.candidates import Candidate, Discovery
from graft.workbench.discover.lookup import look_in_graft
from graft.workbench.discover.savings import SymbolValues, fused_bytes, sizes_for

MOST_BYTES = 4 << 30  # of the inputs of one site
IN_A_ROW, REPEATS = 8, 7
FAILURES = launch_failures()


@dataclass(frozen=True)
class Measured:
    """Microseconds of one site at one count of tokens; or `problem`, why there are none."""

    tokens: int
    device: str
    now_us: float = 0.0
    copy_us: float = 0.0
    existing_us: float | None = None
    sites: int = 1
    problem: str = ""

    @property
    def saving_us(self) -> float:
        """At all sites, with the existing kernel, or else with one that is as fast as the copy."""
        after = self.copy_us if self.existing_us is None else self.existing_us
        return max(0.0, self.now_us - after) * self.sites

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"saving_us": self.saving_us}


def device_to_measure_on(name: str) -> torch.device | None:
    """`auto`: a GPU where there is one. `none`: nothing is timed."""
    if name == "none" or (name == "auto" and not torch.cuda.is_available()):
        return None
    if name not in ("auto", "cuda", "cpu"):
        raise UsageError(f"--measure {name}: auto, cuda, cpu or none")
    if name == "cuda" and not torch.cuda.is_available():
        raise NoGpu("timing candidates on a GPU")
    return torch.device("cpu" if name == "cpu" else "cuda")


def measure(found: Discovery, device: torch.device, progress: Progress | None = None) -> Discovery:
    """The same with what every worthwhile candidate takes on a device."""
    chosen = [candidate.id for candidate in found.worthwhile]
    candidates = []
    for candidate in found.candidates:
        if candidate.id in chosen:
            if progress:
                progress("timing candidates", chosen.index(candidate.id), len(chosen))
            candidate = replace(candidate, measured=tuple(timed(candidate, n, device) for n in found.tokens))
        candidates.append(candidate)
    return replace(found, candidates=tuple(candidates))


def timed(candidate: Candidate, tokens: int, device: torch.device) -> Measured:
    """One site, its sizes as in the estimate."""
    piece, gm = candidate.pieces[0], candidate.subgraph()
    sizes = sizes_for(piece.nodes[0].graph, tokens)
    empty = Measured(tokens, str(device), sites=candidate.count)
    wanted = sum(sizes.bytes(node) for node in placeholders(gm.graph))
    if wanted > MOST_BYTES:
        return replace(empty, problem=f"its inputs are {wanted / 1e9:.1f} GB")
    moved = min(fused_bytes(piece, sizes), MOST_BYTES)
    try:
        inputs = [made_up(val(node), sizes, device) for node in placeholders(gm.graph)]
        source = torch.empty(max(1, moved // 2), dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        now, copy = runtime(gm, inputs, device), microseconds(lambda: target.copy_(source), device)
        own = look_in_graft(gm) if any(one.where == "graft" for one in candidate.existing) else None
        existing = runtime(own.rewritten, inputs, device) if own is not None and own.whole else None
    except (GraftError, ValueError, TypeError, *FAILURES) as error:  # what a run on made-up inputs may end with
        return replace(empty, problem=f"it does not run by itself: {' '.join(str(error).split())[:160]}")
    return replace(empty, now_us=now, copy_us=copy, existing_us=existing)


def made_up(value: Any, sizes: SymbolValues, device: torch.device) -> Any:
    if not isinstance(value, torch.Tensor):
        return sizes.of(value)
    generator = torch.Generator().manual_seed(11)
    return fill([sizes.of(size) for size in value.shape], value.dtype, "random", generator).to(device)


def runtime(gm: GraphModule, inputs: list[Any], device: torch.device) -> float:
    return microseconds(lambda: Interpreter(gm).run(*inputs), device)


def microseconds(work: Callable[[], Any], device: torch.device) -> float:
    """Of one call, the median of several."""
    with torch.no_grad():
        return call_seconds(work, device, REPEATS, in_a_row=IN_A_ROW) * 1e6
