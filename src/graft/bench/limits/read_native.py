"""What a CPU's memory gives, measured with graft's own thread team and compiler: a kernel that only reads."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from graft.backends.native.build import Source, load

SOURCE = Source("""// Reads all of a buffer, for the roofline of `graft bench`.
#include "ops/native/read.h"

extern "C" void* graft_team(int threads) { return new graft::Team(threads); }
extern "C" void graft_team_end(void* team) { delete static_cast<graft::Team*>(team); }
extern "C" uint64_t graft_read(void* team, const uint64_t* at, int64_t words) {
  return graft::read_all(*static_cast<graft::Team*>(team), at, words);
}
""")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Reader:
    """A team of its own that reads a tensor; `read` gives the sum of its 8-byte words, modulo 2**64."""

    def __init__(self, threads: int) -> None:
        self.library, _ = load(SOURCE)
        self.library.graft_team.restype = ctypes.c_void_p
        self.library.graft_team_end.argtypes = (ctypes.c_void_p,)
        self.library.graft_read.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
        self.library.graft_read.restype = ctypes.c_uint64
        self.team = self.library.graft_team(threads)

    def read(self, x: Tensor) -> int:
        return self.library.graft_read(self.team, x.data_ptr(), x.nbytes // 8)

    def close(self) -> None:
        self.library.graft_team_end(self.team)


def last_level_cache(folder: Path = CACHES) -> int:
    """Bytes of the largest cache that the system tells of; 0 where it tells nothing."""
    texts = (path.read_text().strip() for path in folder.glob("index*/size"))
    sizes = [int(text[:-1]) * UNITS[text[-1]] for text in texts if text[-1:] in UNITS and text[:-1].isdigit()]
    return max(sizes, default=sysconf_cache())


def sysconf_cache(names: tuple[str, ...] = ("SC_LEVEL3_CACHE_SIZE", "SC_LEVEL2_CACHE_SIZE")) -> int:
    known: Callable[[str], bool] = getattr(os, "sysconf_names", {}).__contains__
    return max((os.sysconf(name) for name in names if known(name)), default=0)
