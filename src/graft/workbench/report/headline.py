"""What counts first: launches and bytes of a token before and after, how much is checked, the slowest kernels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch.fx import GraphModule

from graft.base.errors import GraftError
from graft.bench.kernels.kernel_times import KernelTime, StepTimes
from graft.ir.nodes import is_op, is_weight
from graft.passes.report import TransformRecord
from graft.workbench.discover.calls import LOOKUPS, is_call, is_free
from graft.workbench.discover.savings import cost, sizes_for
from graft.workbench.discover.values import restore_values
from graft.workbench.report.kernel_file import KernelFile

SLOWEST = 5


@dataclass(frozen=True)
class TokenCost:
    """One sequence, one token: a launch for every call that is no view, and what each call reads and writes.
    `weights`: those of the bytes that are weights, which no fusion saves."""

    launches: int
    bytes: int
    weights: int


@dataclass(frozen=True)
class CheckedShare:
    """How many matches there are, and of how many the numbers were compared, or equality proved."""

    matches: int
    checked: int
    proved: int
    neither: tuple[str, ...]  # transforms with a match that is neither

    def percent(self, number: int) -> float:
        return 100 * number / self.matches if self.matches else 0.0


@dataclass(frozen=True)
class Headline:
    """cost: before and after, or None and `no_cost` why. slowest: of `step`, where kernels were measured."""

    cost: tuple[TokenCost, TokenCost] | None
    no_cost: str
    share: CheckedShare
    step: StepTimes | None
    slowest: tuple[KernelTime, ...]


def headline(
    first: GraphModule, last: GraphModule, records: Iterable[TransformRecord], kernels: KernelFile | None
) -> Headline:
    try:
        counted, why = (token_cost(first), token_cost(last)), ""
    except GraftError as error:
        counted, why = None, str(error)
    step = kernels.steps[0] if kernels is not None and kernels.steps else None
    slowest = sorted(step.rows, key=lambda row: -row.us)[:SLOWEST] if step is not None else ()
    return Headline(counted, why, checked_share(records), step, tuple(slowest))


def token_cost(gm: GraphModule) -> TokenCost:
    restore_values(gm)
    sizes = sizes_for(gm.graph, 1)
    kernels = [node for node in gm.graph.nodes if is_call(node) and not is_free(node) and not is_op(node, *LOOKUPS)]
    weights = sum(sizes.bytes(read) for node in kernels for read in node.all_input_nodes if is_weight(read))
    return TokenCost(*cost(gm.graph.nodes, sizes), weights)


def checked_share(records: Iterable[TransformRecord]) -> CheckedShare:
    pairs = [(record.name, match) for record in records for match in record.matches]
    neither = dict.fromkeys(name for name, match in pairs if match.numeric_check is None and not match.proved)
    checked = sum(match.numeric_check is not None for _, match in pairs)
    return CheckedShare(len(pairs), checked, sum(bool(match.proved) for _, match in pairs), tuple(neither))
