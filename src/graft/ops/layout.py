"""The inputs of the engine's graph: a row of packed tokens, their sequences, and where those lie in the paged cache.

`Batch` is the one place that names and orders them; the caches of each layer come behind. Transforms declare them
(`declare`), the engine builds a step of them (`HostBatch`, `pack`), captured steps have them as views into fixed
memory (`views`, `one_token_each`), and layout_check.py says what is wrong with a batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Graph, Node

from graft.base.errors import LayoutError
from graft.ir.edit import Editor, fake_mode, symbolic_sizes
from graft.ir.nodes import placeholders, tensor_of

Shape = tuple[str | int, ...]
# Sizes that are not known until the graph runs, with the example that the symbol of each is made of: no two are one
# size. "tokens" is another, which the graph has already. logits: rows of logits, which need not be one a sequence.
EXAMPLES = {"logits": 13, "seqs": 17, "table_blocks": 21, "cache_blocks": 25}


def given(shape: Shape, meaning: str, *, on_host: bool = False) -> dict[str, Any]:
    return {"shape": shape, "meaning": meaning, "on_host": on_host}


@dataclass(frozen=True)
class Batch:
    """The inputs, in the graph's order. Sequence i feeds the last query_lens[i] of its seq_lens[i] tokens."""

    input_ids: Tensor = field(metadata=given((1, "tokens"), "the tokens that are fed, sequence after sequence"))
    position_ids: Tensor = field(metadata=given((1, "tokens"), "the position of each in its sequence"))
    logits_indices: Tensor = field(metadata=given(("logits",), "the tokens whose logits are wanted"))
    slot_mapping: Tensor = field(
        metadata=given(("tokens",), "where the cache keeps each: block * block_size + offset")
    )
    token_to_seq: Tensor = field(metadata=given(("tokens",), "the sequence that each belongs to"))
    block_tables: Tensor = field(metadata=given(("seqs", "table_blocks"), "the blocks of each sequence, in order"))
    cu_seqlens: Tensor = field(metadata=given(("seqs + 1",), "the first token of each sequence, then all tokens"))
    seq_lens: Tensor = field(metadata=given(("seqs",), "tokens of each sequence, those that are fed included"))
    # so that nobody waits for a device to know a size
    lens_cpu: Tensor = field(metadata=given(("seqs", 2), "query_lens and seq_lens, on the host", on_host=True))

    def inputs(self) -> tuple[Tensor, ...]:
        """As the graph takes them; the caches follow."""
        return in_order(self)


@dataclass(frozen=True)
class Input:
    """One of them. `shape`: numbers, names of sizes, and "seqs + 1"."""

    name: str
    shape: Shape
    meaning: str
    on_host: bool
    dtype: torch.dtype = torch.int64


INPUTS = tuple(Input(one.name, **one.metadata) for one in fields(Batch))
NAMES = tuple(one.name for one in INPUTS)
PAGED = NAMES[NAMES.index("slot_mapping") :]  # what attention over a paged cache takes, as its arguments are called
in_order = attrgetter(*NAMES)


# ── in the graph ────────────────────────────────────────────────────────────────────────────────────────────────


def declare(editor: Editor, like: Node, names: Collection[str]) -> dict[str, Node]:
    """Adds these inputs to the graph, in their order, on the device of `like`."""
    wanted = [one for one in INPUTS if one.name in names]
    used = {size_name(size)[0] for one in wanted for size in one.shape if isinstance(size, str)}
    new = [size for size in EXAMPLES if size in used]
    known: dict[str, Any] = dict(zip(new, symbolic_sizes(like, [EXAMPLES[size] for size in new]), strict=True))
    if "tokens" in used:
        known["tokens"] = next(tensor_of(n).shape[1] for n in placeholders(editor.graph) if n.name == "input_ids")
    nodes = {}
    for one in wanted:
        shape = [size if isinstance(size, int) else size_of(size, known) for size in one.shape]
        with fake_mode(like):
            device = "cpu" if one.on_host else tensor_of(like).device
            value = torch.empty(shape, dtype=one.dtype, device=device)
        nodes[one.name] = editor.placeholder(one.name, value)
    return nodes


def size_name(size: str) -> tuple[str, int]:
    """ "seqs + 1" → "seqs", 1."""
    name, _, more = size.partition(" + ")
    return name, int(more or 0)


def size_of(size: str, known: Mapping[str, Any]) -> Any:
    name, more = size_name(size)
    return known[name] + more if more else known[name]


def cache_blocks(like: Node) -> torch.SymInt:
    """How many blocks the caches have: one number for all layers."""
    return symbolic_sizes(like, [EXAMPLES["cache_blocks"]])[0]


def cache_names(layer: int, tensors: int = 2) -> tuple[str, ...]:
    """Of keys and of values, or of the latent rows that both are made of."""
    return (f"k_cache_{layer}", f"v_cache_{layer}") if tensors == 2 else (f"latent_cache_{layer}",)


STATE_SLOTS = "state_slots"  # [seqs], where recurrent layers have states: the slot of each sequence


def state_name(recurrence: int) -> str:
    return f"state_{recurrence}"


def check_graph(graph: Graph) -> None:
    """The engine passes inputs by their order: the graph must have these, in this order, caches behind them, and then
    the slots and states of recurrent layers."""
    found = [node.name for node in placeholders(graph)]
    states = found[found.index(STATE_SLOTS) + 1 :] if STATE_SLOTS in found else None
    caches = len(found) - (0 if states is None else len(states) + 1)
    wanted, layer = [*NAMES], 0
    while len(wanted) < caches:
        latent = found[len(wanted)] in cache_names(layer, 1)
        wanted += cache_names(layer, 1 if latent else 2)
        layer += 1
    wanted += [] if states is None else [STATE_SLOTS, *map(state_name, range(len(states)))]
    if found != wanted:
        raise LayoutError(
            f"the engine passes {', '.join(NAMES)}, the caches of each layer, and slots and states of recurrent"
            f" layers, but the graph takes {', '.join(found)}; last_token_logits, insert_kv_cache and"
            " insert_state_cache have to run in this order, and no transform may add inputs"
        )


# ── a step on the host ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class HostBatch:
    """The same as lists; a table is as long as its sequence needs."""

    input_ids: list[int] = field(default_factory=list)
    position_ids: list[int] = field(default_factory=list)
    logits_indices: list[int] = field(default_factory=list)
    slot_mapping: list[int] = field(default_factory=list)
    token_to_seq: list[int] = field(default_factory=list)
    block_tables: list[list[int]] = field(default_factory=list)
    cu_seqlens: list[int] = field(default_factory=lambda: [0])
    seq_lens: list[int] = field(default_factory=list)
    lens_cpu: list[tuple[int, int]] = field(default_factory=list)

    def add(self, tokens: Sequence[int], first: int, blocks: list[int], block_size: int) -> None:
        """One more sequence, which feeds `tokens` from position `first` on. blocks: its table."""
        count, last = len(tokens), first + len(tokens)
        self.token_to_seq += [len(self.seq_lens)] * count
        self.input_ids += tokens
        self.position_ids += range(first, last)
        self.slot_mapping += slots_of(blocks, first, last, block_size)
        self.block_tables.append(blocks[: -(-last // block_size)])
        self.cu_seqlens.append(self.cu_seqlens[-1] + count)
        self.logits_indices.append(self.cu_seqlens[-1] - 1)
        self.seq_lens.append(last)
        self.lens_cpu.append((count, last))

    def padded(self, tokens: int, seqs: int, parts: list[int], padding: int, block_size: int) -> HostBatch:
        """The same step with so many tokens and sequences. The last sequences are the padding, with so many tokens
        each, and their block `padding`; others have no token. Their logits are those of any token."""
        used, n = len(self.input_ids), len(self.seq_lens)
        more, idle = tokens - used, seqs - len(parts) - n
        slots = list(range(padding * block_size, (padding + 1) * block_size)) * -(-more // block_size)
        return HostBatch(
            input_ids=self.input_ids + [0] * more,
            position_ids=self.position_ids + [0] * more,
            logits_indices=self.logits_indices + [0] * (seqs - n),
            slot_mapping=self.slot_mapping + slots[:more],
            token_to_seq=self.token_to_seq + [seq for seq, part in enumerate(parts, n + idle) for _ in range(part)],
            block_tables=self.block_tables + [[padding]] * (seqs - n),
            cu_seqlens=[*self.cu_seqlens, *[used] * idle, *(used + end for end in accumulate(parts))],
            seq_lens=[*self.seq_lens, *[1] * idle, *(max(part, 1) for part in parts)],
            lens_cpu=[*self.lens_cpu, *[(0, 1)] * idle, *((part, max(part, 1)) for part in parts)],
        )

    def padded_tables(self) -> tuple[list[int], int]:
        """[n * m], and m. Padding that is read and masked must not be another's: a NaN there would not be hidden."""
        longest = max(map(len, self.block_tables))
        return [one for each in self.block_tables for one in each + each[:1] * (longest - len(each))], longest

    def flat(self, **more: list[int]) -> tuple[list[int], dict[str, slice]]:
        """All but the tables in one list, and where each lies in it. Each begins at a multiple of 16 bytes: kernels
        are compiled for that, and once more for what is not so. more: what goes with them."""
        lists = {
            "input_ids": self.input_ids, "position_ids": self.position_ids, "logits_indices": self.logits_indices,
            "slot_mapping": self.slot_mapping, "token_to_seq": self.token_to_seq, "cu_seqlens": self.cu_seqlens,
            "seq_lens": self.seq_lens, **more,
        }  # fmt: skip
        flat: list[int] = []
        at = {}
        for name, values in lists.items():
            at[name] = slice(len(flat), len(flat) + len(values))
            flat += values
            flat += [0] * (len(values) % 2)
        return flat, at

    def host_lens(self) -> Tensor:
        return torch.from_numpy(np.array(self.lens_cpu, dtype=np.int64).reshape(-1, 2))


def slots_of(blocks: list[int], first: int, last: int, block_size: int) -> list[int]:
    """Where the cache holds the tokens first…last-1 of a sequence."""
    if last - first < 2 * block_size:  # numpy takes longer over few numbers
        return [blocks[p // block_size] * block_size + p % block_size for p in range(first, last)]
    positions = np.arange(first, last)
    return (np.array(blocks)[positions // block_size] * block_size + positions % block_size).tolist()


# ── a step in tensors ───────────────────────────────────────────────────────────────────────────────────────────


def pack(host: HostBatch, device: torch.device) -> Batch:
    """In one copy, which nobody waits for."""
    tables, longest = host.padded_tables()
    flat, at = host.flat(block_tables=tables)
    sent = on_host(flat, device).to(device, non_blocking=True)
    block_tables = sent[at.pop("block_tables")].view(-1, longest)
    return views(sent, at, block_tables, host.host_lens())


def views(sent: Tensor, at: Mapping[str, slice], block_tables: Tensor, lens_cpu: Tensor) -> Batch:
    """The batch that lies in `sent` as HostBatch.flat says, with tables of their own."""
    each = {name: sent[position] for name, position in at.items()}
    each["input_ids"], each["position_ids"] = each["input_ids"][None], each["position_ids"][None]
    return Batch(**each, block_tables=block_tables, lens_cpu=lens_cpu)


def one_token_each(fed: Tensor, counting: Tensor, block_tables: Tensor, seq_lens: Tensor, lens_cpu: Tensor) -> Batch:
    """A step that decodes, in fixed memory. fed: [3, n], the input ids, positions and slots that graft::advance_rows
    writes; counting: [n + 1], 0, 1, 2, …"""
    input_ids, position_ids, slot_mapping = fed
    return Batch(
        input_ids=input_ids[None],
        position_ids=position_ids[None],
        logits_indices=counting[:-1],
        slot_mapping=slot_mapping,
        token_to_seq=counting[:-1],
        block_tables=block_tables,
        cu_seqlens=counting,
        seq_lens=seq_lens,
        lens_cpu=lens_cpu,
    )


def on_host(values: list[int], device: torch.device) -> Tensor:
    """In memory that the device copies from by itself."""
    found = torch.from_numpy(np.array(values, dtype=np.int64))  # four times as fast as torch.tensor
    return found.pin_memory() if device.type == "cuda" else found
