"""Which of graft::cached_attention's kernels takes which sequences, how many programs it has, and that each is there
before the first request."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from graft.ops.cached_attention import triton as dispatch
from graft.ops.cached_attention.balanced.triton import FEW_ROWS, MOST_ROWS, REGISTERS, sizes_for
from graft.ops.cached_attention.decode import triton as decode
from marks import short

DEVICE = torch.device("cuda")  # named, and not asked for anything


def test_many_sequences_with_room_for_long_contexts_are_shared_out_evenly():
    rule = decode.is_even
    assert rule(8, 8, 2049) and rule(MOST_ROWS, 8, 1 << 17)
    assert not rule(7, 8, 1 << 17) and not rule(8, 8, 2048) and not rule(MOST_ROWS + 1, 8, 1 << 17)


def test_few_programs_have_their_context_in_registers_and_more_warps():
    """Of 132 SMs, by the tables' room: sequences times key-value heads times parts."""
    with mock.patch.object(decode, "processors", lambda _: 132):
        for row, most in ((128, 128), (256, 64), (512, 32)):  # heads of 64, 128 and 256 in 16 bits
            _, parts = decode.early_parts(row, 2048)
            assert decode.is_early(most * parts, 2048, DEVICE) and not decode.is_early(2 * most * parts, 2048, DEVICE)
        assert not decode.is_early(1, 2049, DEVICE)
        assert [decode.early_warps(programs, DEVICE) for programs in (1, 132, 133)] == [8, 8, 4]


class Launched:
    """In a kernel's place: what it is compiled for."""

    def __init__(self, seen):
        self.seen = seen

    def __getitem__(self, grid):
        return lambda *_, **constants: self.seen.append(tuple(sorted(constants.items())))


@pytest.mark.parametrize(
    ("most", "kernels"), short([(1024, 3), (2048, 3), (8192, 5), (8193, 6)], (1024, 3), (8193, 6))
)
def test_every_kernel_that_takes_sequences_beside_prompts_runs_before_the_first_request(most, kernels):
    """What the number of sequences and the width of the tables, that of the longest context, decide: the constants
    that a kernel is compiled with."""
    cache = torch.empty(1, 16, 8, 16)

    def kernel(n, room, longest):
        """What the dispatch leads to: the rows that are shared out evenly, or the constants of split_kv."""
        seen = []
        lens, q = torch.full((n, 2), longest), torch.empty(1, 16, n + 1, 16)
        with (
            mock.patch.object(decode, "balanced", lambda *_: seen.append(FEW_ROWS if n <= FEW_ROWS else MOST_ROWS)),
            mock.patch.object(decode, "split_kv_kernel", Launched(seen)),
        ):
            tables = torch.empty(n + 1, -(-room // 16))
            dispatch.decode_beside(q, cache, cache, tables, lens[:, 1], lens, (1.0, None, None, None), q, n)
        return seen[0] if seen else "prefill"

    with mock.patch.object(decode, "processors", lambda _: 132):
        ahead = {kernel(*case) for case in dispatch.decoding_cases(8, most)}
        rooms = {16, 512, min(most, 2048), min(most, 2064), most}
        lengths = {room: {1, min(room, 8192), room} for room in rooms}
        met = {
            kernel(n, room, longest) for n in range(1, MOST_ROWS + 1) for room in rooms for longest in lengths[room]
        }
        assert met == ahead and len(ahead) == kernels


def test_programs_of_an_sm_fit_its_registers_and_shared_memory():
    for row in (32, 128, 256, 512, 1024):
        for twice in (1, 2):
            tile, warps, count = sizes_for(row, twice)
            assert count * warps * 32 * REGISTERS <= 65536 and count * 2 * 2 * tile * row // twice <= 227 * 1024
            assert tile == 16 * twice and count >= 1
