"""Whether a batch is one that the engine's graph computes right: shapes, and numbers that say the same."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from graft.base.errors import LayoutError
from graft.ops.layout import INPUTS, Batch, size_name


def check(
    batch: Batch, block_size: int, cache_blocks: int, *, padding: int | None = None, captured: bool = False
) -> None:
    """Raises LayoutError with all that is wrong, waiting for the device.

    padding: the block of sequences that stand for nobody; any position and slot of that block will do for them.
    captured: a step in fixed memory on a device, whose kernels take no sizes from the host.
    """
    wrong = list(shape_problems(batch)) or list(value_problems(batch, block_size, cache_blocks, padding, captured))
    if wrong:
        raise LayoutError(f"a batch for the engine's graph is malformed: {'; '.join(wrong)}")


def shape_problems(batch: Batch) -> Iterator[str]:
    known: dict[str, int] = {}
    device = batch.input_ids.device
    for one in INPUTS:
        tensor: Tensor = getattr(batch, one.name)
        wanted = f"[{', '.join(map(str, one.shape))}]"
        if tensor.dtype != one.dtype:
            yield f"{one.name} is {tensor.dtype}, not {one.dtype}"
        where = torch.device("cpu") if one.on_host else device
        if tensor.device != where:
            yield f"{one.name} is on {tensor.device}, not on {where}"
        if tensor.dim() != len(one.shape):
            yield f"{one.name} is {list(tensor.shape)}, not {wanted}"
            continue
        for size, found in zip(one.shape, tensor.shape, strict=True):
            name, more = (None, size) if isinstance(size, int) else size_name(size)
            expected = more if name is None else known.setdefault(name, found - more) + more
            if found != expected:
                yield f"{one.name} is {list(tensor.shape)}, not {wanted}: {size} is {expected}"


def value_problems(
    batch: Batch, block_size: int, cache_blocks: int, padding: int | None, captured: bool
) -> Iterator[str]:
    each = {one.name: getattr(batch, one.name).cpu() for one in INPUTS}
    cu, seq_lens, tables = each["cu_seqlens"], each["seq_lens"], each["block_tables"]
    tokens, query_lens = each["input_ids"].shape[1], cu.diff()
    if int(cu[0]) != 0 or int(cu[-1]) != tokens or bool((query_lens < 0).any()):
        yield f"cu_seqlens {cu.tolist()} does not go from 0 up to {tokens} tokens"
        return
    if bool((query_lens > seq_lens).any()):
        yield f"query_lens {query_lens.tolist()} are more than seq_lens {seq_lens.tolist()}"
    if not captured and not torch.equal(each["lens_cpu"], torch.stack((query_lens, seq_lens), dim=1)):
        yield "lens_cpu does not say what cu_seqlens and seq_lens do"
    if not inside(each["logits_indices"], tokens):
        yield f"logits_indices {each['logits_indices'].tolist()} are not among {tokens} tokens"
    if bool((seq_lens > tables.shape[1] * block_size).any()):
        yield f"tables of {tables.shape[1]} blocks of {block_size} are too narrow for seq_lens {seq_lens.tolist()}"
    elif not inside(tables, cache_blocks):
        yield f"block_tables names blocks that a cache of {cache_blocks} has not"
    else:
        yield from token_problems(each, query_lens, block_size, padding)


def token_problems(
    each: dict[str, Tensor], query_lens: Tensor, block_size: int, padding: int | None
) -> Iterator[str]:
    """What each token says of itself against what its sequence says. Sequences in the padding block are nobody's."""
    tables = each["block_tables"]
    owner = torch.repeat_interleave(query_lens)
    if not torch.equal(each["token_to_seq"], owner):
        yield f"token_to_seq is {each['token_to_seq'].tolist()}, not {owner.tolist()}"
    positions = each["seq_lens"][owner] - each["cu_seqlens"][1:][owner] + torch.arange(len(owner))
    slots = tables[owner, positions // block_size] * block_size + positions % block_size
    mine = tables[owner, 0] != (-1 if padding is None else padding)
    found, mapped = each["position_ids"][0], each["slot_mapping"]
    if not torch.equal(found[mine], positions[mine]):
        yield f"position_ids is {found.tolist()}, not {positions.tolist()}"
    if not torch.equal(mapped[mine], slots[mine]):
        yield f"slot_mapping is {mapped.tolist()}, not {slots.tolist()}"
    if len(mapped[mine].unique()) != int(mine.sum()):
        yield f"two tokens have one slot: {mapped.tolist()}"
    used = (each["seq_lens"] + block_size - 1) // block_size
    for seq, (table, count) in enumerate(zip(tables.tolist(), used.tolist(), strict=True)):
        if int(query_lens[seq]) and table[0] != padding and len(set(table[:count])) < count:
            yield f"sequence {seq} has a block twice: {table[:count]}"
    if padding is not None and not torch.equal(mapped[~mine] // block_size, torch.full_like(mapped[~mine], padding)):
        yield f"padding is written into blocks of others: {mapped[~mine].tolist()}"


def inside(values: Tensor, end: int) -> bool:
    return bool(((values >= 0) & (values < end)).all())
