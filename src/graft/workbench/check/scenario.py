"""The steps that a decoder's graph is run through: a prompt, decode steps, a mixed batch, a long prompt.

Every graph of a run gives the same rows of logits, with a cache or without one: where it has none, each sequence is
run whole, the one of a single token too, so that what is wrong for one token or above a tile shows before the cache
is there, and the transform to blame is named rather than the one that brings the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from graft.base.errors import DumpError
from graft.ir.nodes import placeholders
from graft.ops.layout import HostBatch, pack
from graft.workbench.discover.values import DTYPES, TENSOR, split

SEED, VOCABULARY = 0, 100  # no model has fewer tokens
LENGTHS = (12, 6, 1, 70)  # of the sequences; the last is longer than a tile of 64
# what each step feeds: (sequence, first token, last token + 1)
STEPS = (
    ((0, 0, 8),),  # a prompt
    ((0, 8, 9),),  # a decode step
    ((0, 9, 10),),  # another of the same shape: what was kept from the first would show
    ((0, 10, 11), (1, 0, 5), (2, 0, 1)),  # decoding beside two prompts
    ((0, 11, 12), (1, 5, 6)),  # two sequences decode
    ((3, 0, 70),),
)
BLOCK = 16  # tokens in a block of the cache, where the graph does not say


@dataclass(frozen=True)
class WantedRow:
    """The logits that follow one token."""

    sequence: int
    position: int


ROWS = tuple(WantedRow(sequence, last - 1) for step in STEPS for sequence, _, last in step)


def sequences() -> list[list[int]]:
    """The same in every run and for every model."""
    tokens = torch.randint(0, VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(SEED))
    return [part.tolist() for part in tokens.split(LENGTHS)]


def logits(gm: GraphModule) -> Tensor:
    """[1, rows, vocabulary]: what follows the last token that each sequence feeds in each step."""
    names = {node.name for node in placeholders(gm.graph)}
    with torch.no_grad():
        rows = with_cache(gm) if "slot_mapping" in names else whole_sequences(gm)
    return torch.stack(rows)[None]


def with_cache(gm: GraphModule) -> list[Tensor]:
    """Step after step, with the caches as the steps before left them."""
    caches = {n: empty_cache(n) for n in placeholders(gm.graph) if n.name not in vars(pack(one_token(), cpu()))}
    block = next(iter(caches.values())).shape[1] if caches else BLOCK
    tables = block_tables(block)
    found: list[Tensor] = []
    for step in STEPS:
        host = HostBatch()
        for sequence, first, last in step:
            host.add(sequences()[sequence][first:last], first, tables[sequence], block)
        known = vars(pack(host, cpu()))
        given = [known[n.name] if n.name in known else caches[n] for n in placeholders(gm.graph)]
        found += Interpreter(gm).run(*given)[0].detach()[0]
    return found


def whole_sequences(gm: GraphModule) -> list[Tensor]:
    """Each by itself in one pass; the rows are picked from it."""
    found: dict[WantedRow, Tensor] = {}
    for sequence, tokens in enumerate(sequences()):
        wanted = [row for row in ROWS if row.sequence == sequence]
        host = HostBatch()
        host.add(tokens, 0, list(range(len(tokens))), BLOCK)
        chosen = any(node.name == "logits_indices" for node in placeholders(gm.graph))
        host.logits_indices = [row.position for row in wanted]
        known = vars(pack(host, cpu()))
        given = [known[n.name] if n.name in known else empty_cache(n) for n in placeholders(gm.graph)]
        (made,) = Interpreter(gm).run(*given)[0].detach()
        found |= {row: made[index if chosen else row.position] for index, row in enumerate(wanted)}
    return [found[row] for row in ROWS]


def one_token() -> HostBatch:
    host = HostBatch()
    host.add([0], 0, [0], BLOCK)
    return host


def block_tables(block: int) -> list[list[int]]:
    """Each sequence has blocks of its own."""
    tables, free = [], 0
    for length in LENGTHS:
        count = -(-length // block)
        tables.append(list(range(free, free + count)))
        free += count
    return tables


def empty_cache(node: Node) -> Tensor:
    """Zeros in the shape that is recorded; a size that is open (how many blocks there are) is enough for all."""
    recorded = node.meta.get("val")
    text = str(node.meta.get("value_text"))
    enough = sum(LENGTHS)
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
