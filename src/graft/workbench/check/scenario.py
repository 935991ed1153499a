"""The steps that a decoder's graph is run through: a prompt, decode steps, a mixed batch, a long prompt.

Every graph of a run gives the same rows of logits, with a cache or without one: where it has none, each sequence is
run whole, the one of a single token too, so that what is wrong for one token or above a tile shows before the cache
is there, and the transform to blame is named rather than the one that brings the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from graft.base.errors import DumpError
from graft.ir.nodes import placeholders
from graft.ops.layout import STATE_SLOTS, Batch, HostBatch, pack
from graft.passes.numeric.execution import in_float64
from graft.passes.numeric.inputs import widened
from graft.workbench.discover.values import DTYPES, TENSOR, split

SEED, VOCABULARY = 0, 100  # no model has fewer tokens
LENGTHS = (12, 6, 1, 70)  # of the sequences; the last is longer than a tile of 64
PROMPT, DECODED = 8, 4  # tokens of the first one
BLOCK = 16  # tokens in a block of the cache, where the graph does not say


@dataclass(frozen=True)
class WantedRow:
    """The logits that follow one token."""

    sequence: int
    position: int


@dataclass(frozen=True)
class Scenario:
    """Some sequences of tokens; of the first one, all but the last DECODED tokens are its prompt."""

    sequences: tuple[tuple[int, ...], ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(map(len, self.sequences))

    @property
    def steps(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        return steps_behind(len(self.sequences[0]) - DECODED)

    @property
    def rows(self) -> tuple[WantedRow, ...]:
        return tuple(WantedRow(sequence, last - 1) for step in self.steps for sequence, _, last in step)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of each row, the kind of step that it comes from."""
        return tuple(kind_of_step(step) for step in self.steps for _ in step)

    def tables(self, block: int) -> list[list[int]]:
        """Each sequence has blocks of its own."""
        tables, free = [], 0
        for length in self.lengths:
            count = -(-length // block)
            tables.append(list(range(free, free + count)))
            free += count
        return tables

    def batches(self, block: int, device: torch.device) -> Iterator[Batch]:
        """What each step feeds, for caches that hold this scenario alone."""
        tables = self.tables(block)
        for step in self.steps:
            host = HostBatch()
            for sequence, first, last in step:
                host.add(list(self.sequences[sequence][first:last]), first, tables[sequence], block)
            yield pack(host, device)


def steps_behind(prompt: int) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """What each step feeds: (sequence, first token, last token + 1)."""
    return (
        ((0, 0, prompt),),
        ((0, prompt, prompt + 1),),  # a decode step
        ((0, prompt + 1, prompt + 2),),  # another of the same shape: what was kept from the first would show
        ((0, prompt + 2, prompt + 3), (1, 0, 5), (2, 0, 1)),  # decoding beside two prompts
        ((0, prompt + 3, prompt + 4), (1, 5, 6)),  # two sequences decode
        ((3, 0, LENGTHS[3]),),
    )


def kind_of_step(step: Sequence[tuple[int, int, int]]) -> str:
    prompts = {first == 0 for _, first, _ in step}
    return "mixed batch" if len(prompts) > 1 else "prompt" if True in prompts else "decode steps"


def standard_scenario() -> Scenario:
    """The same in every run and for every model."""
    tokens = torch.randint(0, VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(SEED))
    return Scenario(tuple(tuple(part.tolist()) for part in tokens.split(LENGTHS)))


def scenario_of(prompt: Sequence[int]) -> Scenario:
    """The same with this prompt; what is decoded behind it are tokens of the standard one."""
    first, *others = standard_scenario().sequences
    return Scenario(((*prompt, *first[-DECODED:]), *others))


STANDARD = standard_scenario()
STEPS, ROWS = STANDARD.steps, STANDARD.rows


def logits(gm: GraphModule, scenario: Scenario = STANDARD, *, exact: bool = False) -> Tensor:
    """[1, rows, vocabulary]: what follows the last token that each sequence feeds in each step. exact: every op runs
    in float64."""
    names = {node.name for node in placeholders(gm.graph)}
    run = Exact(gm).run if exact else Interpreter(gm).run
    with torch.no_grad():
        rows = with_cache(gm, scenario, run) if "slot_mapping" in names else whole_sequences(gm, scenario, run)
    return torch.stack(rows)[None]


class Exact(Interpreter):
    """Runs a graph in float64, weights too; each is widened when it is read."""

    def run_node(self, n: Node) -> Any:
        if n.op != "call_function":
            made = super().run_node(n)
            return widened(made) if n.op == "get_attr" and isinstance(made, Tensor) else made
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return in_float64(n.target, args, kwargs)


def with_cache(gm: GraphModule, scenario: Scenario, run: Callable[..., Any]) -> list[Tensor]:
    """Step after step, with the caches as the steps before left them."""
    inputs = placeholders(gm.graph)
    known = set(vars(pack(one_token(), cpu()))) | {STATE_SLOTS}
    caches = {node: empty_cache(node, scenario) for node in inputs if node.name not in known}
    block = next(iter(caches.values())).shape[1] if caches else BLOCK
    found: list[Tensor] = []
    for batch in scenario.batches(block, cpu()):
        given = {**vars(batch), STATE_SLOTS: slots_in(batch)}
        found += run(*[given[n.name] if n.name in given else caches[n] for n in inputs])[0].detach()[0]
    return found


def whole_sequences(gm: GraphModule, scenario: Scenario, run: Callable[..., Any]) -> list[Tensor]:
    """Each by itself in one pass; the rows are picked from it."""
    found: dict[WantedRow, Tensor] = {}
    chosen = any(node.name == "logits_indices" for node in placeholders(gm.graph))
    for sequence, tokens in enumerate(scenario.sequences):
        wanted = [row for row in scenario.rows if row.sequence == sequence]
        host = HostBatch()
        host.add(list(tokens), 0, list(range(len(tokens))), BLOCK)
        host.logits_indices = [row.position for row in wanted]
        batch = pack(host, cpu())
        known = {**vars(batch), STATE_SLOTS: slots_in(batch)}
        given = [known[n.name] if n.name in known else empty_cache(n, scenario) for n in placeholders(gm.graph)]
        (made,) = run(*given)[0].detach()
        found |= {row: made[index if chosen else row.position] for index, row in enumerate(wanted)}
    return [found[row] for row in scenario.rows]


def slots_in(batch: Batch) -> Tensor:
    """Where recurrent layers keep the state of each sequence: under the number of its first block."""
    return batch.block_tables[:, 0]


def one_token() -> HostBatch:
    host = HostBatch()
    host.add([0], 0, [0], BLOCK)
    return host


def empty_cache(node: Node, scenario: Scenario) -> Tensor:
    """Zeros in the shape that is recorded; a size that is open (how many blocks there are) is enough for all."""
    recorded = node.meta.get("val")
    text = str(node.meta.get("value_text"))
    enough = sum(scenario.lengths)
    if isinstance(recorded, Tensor):
        return torch.zeros([s if isinstance(s, int) else enough for s in recorded.shape], dtype=recorded.dtype)
    found = TENSOR.fullmatch(text)
    if found is None or not DTYPES[found[1]].is_floating_point:
        raise DumpError(
            f"the graph has the input {node.name} ({text}), which no decoder of graft has; it was not run"
        )
    sizes = [int(size) if size.isdigit() else enough for size in split(found[2])]
    return torch.zeros(sizes, dtype=DTYPES[found[1]])


def cpu() -> torch.device:
    return torch.device("cpu")
