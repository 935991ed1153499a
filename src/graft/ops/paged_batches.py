"""Batches of sequences over a paged cache: prefill, decode, chunked prefill and mixtures."""

from __future__ import annotations

from typing import Any

import torch

from graft.ops.cases import randn


def make(
    new: tuple[int, ...], old: tuple[int, ...], h: int, kv: int, d: int, options: tuple[Any, ...],
    device: str, dtype: torch.dtype, generator: torch.Generator,
) -> tuple[Any, ...]:  # fmt: skip
    """Sequence i has old[i] tokens in the cache and brings new[i] more; its blocks lie scattered."""
    block = 16
    seq_lens = torch.tensor([n + o for n, o in zip(new, old, strict=True)])
    per_sequence = int(-(-seq_lens.max() // block))
    order = torch.randperm(len(new) * per_sequence, generator=generator)
    tables = order.view(len(new), per_sequence)
    cu_seqlens = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()])
    token_to_seq = torch.repeat_interleave(torch.arange(len(new)), torch.tensor(new))
    positions = torch.cat([torch.arange(o, o + n) for n, o in zip(new, old, strict=True)])
    slot_mapping = tables[token_to_seq, positions // block] * block + positions % block
    q = randn((1, h, sum(new), d), device, dtype, generator)
    k, v = (randn((1, kv, sum(new), d), device, dtype, generator) for _ in range(2))
    caches = [randn((len(order), block, kv, d), device, dtype, generator) for _ in range(2)]
    layout = [t.to(device) for t in (slot_mapping, token_to_seq, tables, cu_seqlens, seq_lens)]
    lens_cpu = torch.stack((torch.tensor(new), seq_lens), dim=1)  # on the CPU
    window, softcap, has_sinks = options
    sinks = randn((h,), device, dtype, generator) if has_sinks else None
    return q, k, v, *caches, *layout, lens_cpu, d**-0.5, window, softcap, sinks


PLAIN = (None, None, False)
BATCHES: list[tuple[str, tuple[Any, ...], int]] = [  # name, arguments of `make`, reduction
    ("smollm2-135m decode", ((1,), (40,), 9, 3, 64, PLAIN), 64),
    ("decode, batch of three", ((1, 1, 1), (5, 33, 70), 4, 2, 32, PLAIN), 70),
    ("prefill of two", ((7, 18), (0, 0), 4, 4, 32, PLAIN), 32),
    ("mixed: chunk, decode, prefill", ((6, 1, 9), (20, 17, 0), 8, 2, 16, PLAIN), 32),
    ("sliding window", ((5, 1), (30, 44), 4, 2, 32, (9, None, False)), 32),
    ("window decode", ((1, 1), (3, 44), 4, 2, 32, (9, None, False)), 32),
    ("soft cap", ((3, 1), (11, 25), 4, 2, 32, (None, 20.0, False)), 32),
    ("sinks", ((3, 1), (11, 25), 4, 2, 32, (None, None, True)), 32),
    ("head size 80", ((4, 1), (0, 19), 4, 1, 80, PLAIN), 80),
]
