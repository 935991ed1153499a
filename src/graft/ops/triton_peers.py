"""How lanes of several ranks meet in a kernel (peers.py has the memory)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def flags_of(bases, peer, flags_at):
    return (tl.load(bases + peer) + flags_at).to(tl.pointer_type(tl.int64))


@triton.jit
def part_of(bases, peer, epoch, lane, like, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """The slot of a rank's lane for this epoch, as a pointer to elements of `like`."""
    start = (tl.load(bases + peer) + (epoch % 2 * LANES + lane) * WIDTH).to(like.dtype)
    return tl.multiple_of(start, 16)


@triton.jit
def tell_all(bases, flags_at, rank, lane, epoch, WORLD: tl.constexpr, LANES: tl.constexpr):
    """What all threads of this program wrote before is there for whoever sees the epoch."""
    tl.debug_barrier()
    for peer in tl.static_range(WORLD):
        tl.atomic_xchg(flags_of(bases, peer, flags_at) + rank * LANES + lane, epoch, sem="release", scope="sys")


@triton.jit(debug=True)
def wait_for_all(bases, flags_at, rank, lane, epoch, most, WORLD: tl.constexpr, LANES: tl.constexpr):
    """A rank that is gone never comes: after `most` looks the kernel fails, and the process with it."""
    flags = flags_of(bases, rank, flags_at)
    for peer in tl.static_range(WORLD):
        looks = 0
        while (tl.atomic_add(flags + peer * LANES + lane, 0, sem="acquire", scope="sys") < epoch) & (looks < most):
            looks += 1
        tl.device_assert(looks < most, "another rank never wrote its part of a sum")
    tl.debug_barrier()
