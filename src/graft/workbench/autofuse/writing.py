"""The files of a candidate: written once for its trial, and the same again into the package where it is kept."""

from __future__ import annotations

from dataclasses import dataclass

from graft.base.errors import GraftError
from graft.workbench.autofuse.ledger import KernelPath
from graft.workbench.discover import Candidate
from graft.workbench.discover.gemms import layer_names
from graft.workbench.scaffold.candidate import Seed, seed_of
from graft.workbench.scaffold.destination import Destination
from graft.workbench.scaffold.merge import write_merge
from graft.workbench.scaffold.plan import Written, transform_from


@dataclass(frozen=True)
class CandidateWriter:
    """own: with kernels of its own where some exist, too. ahead_of: kept transforms whose sites it takes first."""

    candidate: Candidate
    model: str
    own: bool = False
    ahead_of: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"fuse_{self.candidate.function_name}"

    @property
    def merges(self) -> bool:
        return self.candidate.kind == "horizontal_gemm"

    def shapes(self) -> dict[str, str]:
        return {} if self.merges else dict(self.candidate.pattern_shapes())

    def trial(self, place: Destination) -> tuple[Written, KernelPath, str]:
        """With the kernel that exists, where one can be called; else with kernels that are written here. A merge has
        the GEMM that was there. Also a note on that."""
        if self.merges:
            written = write_merge(self.name, layer_names(self.candidate.pieces[0]), place)
            return written, "existing_kernel_path", "; by aten::linear"
        seed = seed_of(self.candidate, self.model)
        whole = self.candidate.estimates[0].launches_after <= self.candidate.count  # one kernel, not a part by one
        return write_trial(self.name, seed, place, own=self.own or not whole, ahead_of=self.ahead_of)

    def keep(self, place: Destination, *, op: bool) -> None:
        """Switched on. A run that was killed in between writes them anew."""
        if self.merges:
            write_merge(self.name, layer_names(self.candidate.pieces[0]), place, force=True, enabled=True)
        else:
            seed = seed_of(self.candidate, self.model)
            transform_from(self.name, seed, place, op=op, force=True, enabled=True, ahead_of=self.ahead_of)


def write_trial(
    name: str, seed: Seed, place: Destination, *, own: bool, ahead_of: tuple[str, ...] = ()
) -> tuple[Written, KernelPath, str]:
    note = ""
    if seed.existing and not own:
        try:
            written = transform_from(name, seed, place, ahead_of=ahead_of)
            return written, "existing_kernel_path", f"; by {seed.existing[0][1]}"
        except GraftError as error:
            note = f"; {seed.existing[0][1]} was not called: {' '.join(str(error).split())[:160]}"
    return transform_from(name, seed, place, op=True, ahead_of=ahead_of), "triton_fallback_path", note
